"""The REPLUG mixture against numbers worked out by hand."""

import math

import numpy as np
import pytest

from replug.models.ensemble import document_weights, mix_token_logprobs

LOG_3 = math.log(3)


def test_the_mixture_equals_the_one_computed_by_hand() -> None:
    given = np.log([[0.5, 0.2], [0.1, 0.4]])  # two documents, two tokens
    mixed = mix_token_logprobs(given, np.array([LOG_3, 0.0]))  # weights 3/4 and 1/4
    np.testing.assert_allclose(np.exp(mixed), [0.4, 0.25])


def test_probabilities_are_mixed_and_not_logits() -> None:
    # A word of logit log 99 against 0 has p = 0.99; of logit 0 against 0, p = 0.5. The mean of the logits
    # gives sqrt(99) / (1 + sqrt(99)) = 0.909, and the mean of the log-probs sqrt(0.99 * 0.5) = 0.704.
    mixed = mix_token_logprobs(np.log([[0.99], [0.5]]), np.zeros(2))
    assert math.exp(mixed[0]) == pytest.approx((0.99 + 0.5) / 2)


@pytest.mark.parametrize("similarity", [-50.0, 900.0])
def test_one_document_gives_its_own_log_probs_whatever_its_similarity(similarity: float) -> None:
    given = np.log([[0.5, 0.001, 0.9]])
    np.testing.assert_allclose(mix_token_logprobs(given, np.array([similarity])), given[0])


def test_tiny_probabilities_do_not_underflow() -> None:
    mixed = mix_token_logprobs(np.array([[-2000.0, -5.0], [-2001.0, -2000.0]]), np.zeros(2))
    np.testing.assert_allclose(mixed, [-2000 + math.log((1 + math.exp(-1)) / 2), -5 - math.log(2)], rtol=0, atol=1e-9)


# Weights, and answers of which nothing is seen but themselves -----------------------------------------------------


def test_document_weights_are_the_softmax_of_the_similarities() -> None:
    np.testing.assert_allclose(document_weights([LOG_3, 0.0]), [0.75, 0.25])
    weights = document_weights(np.array([900.0, -900.0, 899.0], dtype=np.float32))
    assert weights.sum() == 1
    assert document_weights([0.3]).tolist() == [1.0]
    assert document_weights([]).tolist() == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_similarities_that_are_not_finite_are_value_errors(wrong: float) -> None:
    with pytest.raises(ValueError, match="expected finite numbers"):
        document_weights([0.1, wrong])
