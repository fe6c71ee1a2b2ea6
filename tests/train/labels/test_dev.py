"""A look at development texts, from stored log-probs: against numbers worked out by hand and a naive mixture."""

import math

import numpy as np
import pytest

from replug.evals.temperature_fit import ensemble_bits
from replug.train.labels.dev import nearest, scored_share


def test_the_ensemble_of_one_text_is_the_mixture_at_every_token():
    tokens = np.log([[0.5, 0.25], [0.25, 0.5]]).astype(np.float32)
    weights = np.array([0.8, 0.2])
    similarities = np.log(weights)[None] * 0.1  # at the temperature 0.1 these weights
    expected = -math.log2(0.8 * 0.5 + 0.2 * 0.25) - math.log2(0.8 * 0.25 + 0.2 * 0.5)
    assert ensemble_bits([nearest(tokens, similarities[0], 2)], 0.1) == pytest.approx(expected, rel=1e-6)


def test_only_the_first_k_by_the_similarities_are_mixed():
    tokens = np.log([[0.5], [0.25], [0.125]]).astype(np.float32)
    assert ensemble_bits([nearest(tokens, np.array([0.1, 0.9, 0.5]), 1)], 1.0) == pytest.approx(2.0, rel=1e-6)


def test_a_low_temperature_takes_the_nearest_document_alone():
    tokens = np.log([[0.5], [0.125]]).astype(np.float32)
    assert ensemble_bits([nearest(tokens, np.array([0.2, 0.9]), 2)], 0.001) == pytest.approx(3.0, rel=1e-6)


def test_the_share_of_nearest_documents_that_were_scored():
    similarities = np.array([[0.9, 0.8, 0.1, 0.2], [0.1, 0.2, 0.9, 0.8]])
    assert scored_share(similarities, np.array([[0, 1], [2, 0]]), 2) == 0.75  # of the second text, one of two
    assert scored_share(similarities, np.array([[2, 3], [0, 1]]), 2) == 0.0
    assert scored_share(similarities, np.array([[2, 3], [0, 1]]), 4) == 0.5
