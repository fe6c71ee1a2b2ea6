"""What a training takes of labels, against numbers worked out by hand."""

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.data.labels import LabelledTexts
from replug.models.ensemble import log_softmax
from replug.train.labels.targets import beta_for_entropy, document_scores, gains, query_weights, with_scores
from replug.train.temperature import entropy_share

TEXTS = LabelledTexts(
    doc_rows=np.array([[0, 1], [2, 3], [4, 5]]),
    sum_logprobs=np.array([[-4.0, -8.0], [-12.0, -8.0], [-9.0, -3.0]]),
    sum_logprobs_alone=np.array([-6.0, -4.0, -9.0]),
    num_tokens=np.array([2, 4, 3]),
    similarities=np.zeros((3, 2), np.float32),
)


def test_z_is_the_mean_log_prob_of_each_document():
    np.testing.assert_allclose(document_scores(TEXTS, "mean_logprob"), [[-2, -4], [-3, -2], [-3, -1]])


@pytest.mark.parametrize("lm_score", ["mean_logprob", "sum_logprob"])
def test_texts_with_other_scores_have_their_softmax_as_q_and_the_mean_of_the_lms(lm_score):
    scores = np.array([[5.0, 6.0], [-1.0, 1.0], [0.0, 0.0]])
    z = document_scores(with_scores(TEXTS, scores, lm_score, beta=0.25), lm_score)
    np.testing.assert_allclose(log_softmax(z / 0.25), log_softmax(scores))
    np.testing.assert_allclose(z.mean(axis=1), document_scores(TEXTS, lm_score).mean(axis=1))


def test_a_gain_is_what_the_best_document_adds_or_nothing():
    np.testing.assert_allclose(gains(TEXTS, "mean_logprob"), [-2 + 3, 0, -1 + 3])


def test_weights_are_in_proportion_to_the_gains_and_their_mean_is_1():
    np.testing.assert_allclose(query_weights(np.array([1.0, 0.0, 2.0])), [1, 0, 2])
    np.testing.assert_allclose(query_weights(np.array([3.0, 0.0, 3.0, 6.0])), [1, 0, 1, 2])
    with pytest.raises(UserError, match=r"loss\.weigh_queries: no labelled text"):
        query_weights(np.zeros(3))


def test_beta_from_an_entropy_gives_q_that_share():
    scores = np.random.default_rng(0).normal(size=(50, 6))
    for share in (0.2, 0.5, 0.9):
        assert entropy_share(scores, beta_for_entropy(scores, share)) == pytest.approx(share, abs=1e-6)
    with pytest.raises(UserError, match="equal or nearly so"):
        beta_for_entropy(np.zeros((3, 4)), 0.5)
