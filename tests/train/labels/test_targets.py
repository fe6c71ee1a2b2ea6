"""What a training takes of labels, against numbers worked out by hand."""

import numpy as np

from replug.data.labels import LabelledTexts
from replug.train.labels.dev import document_scores

TEXTS = LabelledTexts(
    doc_rows=np.array([[0, 1], [2, 3], [4, 5]]),
    sum_logprobs=np.array([[-4.0, -8.0], [-12.0, -8.0], [-9.0, -3.0]]),
    num_tokens=np.array([2, 4, 3]),
    similarities=np.zeros((3, 2), np.float32),
)


def test_z_is_the_mean_log_prob_of_each_document():
    np.testing.assert_allclose(document_scores(TEXTS, "mean_logprob"), [[-2, -4], [-3, -2], [-3, -1]])
