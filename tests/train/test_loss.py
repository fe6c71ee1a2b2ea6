"""The LSR loss and its gradients against plain Python, written out from the formulas."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from replug.config.choices import LMScore
from replug.train import loss as losses
from replug.train.loss import (
    contrastive_losses,
    entropy,
    lm_scores,
    log_likelihood,
    text_losses,
)

GAMMA, BETA = 0.5, 0.25
SIMILARITIES = [[0.9, 0.2, 0.4], [-0.1, 0.3, 0.3]]  # two queries, three documents
LM_SCORES = [[-2.0, -1.5, -1.8], [-0.2, -0.9, -0.3]]


def softmax(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp(value / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_hand(direction: str) -> tuple[float, list[list[float]]]:
    """The loss, and its gradient with respect to the similarities."""
    loss, gradient = 0.0, []
    for similarities, scores in zip(SIMILARITIES, LM_SCORES, strict=True):
        p, q = softmax(similarities, GAMMA), softmax(scores, BETA)
        if direction == "kl_lm_retriever":  # d KL(Q || P) / ds = (p - q) / gamma
            loss += kl(q, p) / 2
            gradient.append([(a - b) / GAMMA / 2 for a, b in zip(p, q, strict=True)])
        else:  # d KL(P || Q) / ds = p (log(p / q) - KL) / gamma
            loss += kl(p, q) / 2
            gradient.append([a * (math.log(a / b) - kl(p, q)) / GAMMA / 2 for a, b in zip(p, q, strict=True)])
    return loss, gradient


def loss_of(direction: str) -> tuple[Tensor, Tensor, Tensor]:
    similarities = torch.tensor(SIMILARITIES, dtype=torch.float64, requires_grad=True)
    scores = torch.tensor(LM_SCORES, dtype=torch.float64, requires_grad=True)
    loss = text_losses(log_likelihood(scores, BETA), log_likelihood(similarities, GAMMA), direction).mean()
    return loss, similarities, scores


@pytest.mark.parametrize("direction", losses.LOSSES)
def test_loss_and_gradient_equal_those_computed_by_hand(direction: str) -> None:
    loss, similarities, scores = loss_of(direction)
    loss.backward()
    assert scores.grad is None  # only the retriever learns
    expected_loss, expected_gradient = by_hand(direction)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    np.testing.assert_allclose(similarities.grad, expected_gradient, rtol=1e-9)


@pytest.mark.parametrize("direction", losses.LOSSES)
def test_one_hot_distributions_stay_finite_in_float32(direction: str) -> None:
    similarities = torch.tensor([[500.0, 0.0, -500.0]], requires_grad=True)
    log_q = log_likelihood(torch.tensor([[-3000.0, -10.0, -9000.0]]), 0.1)
    loss = text_losses(log_q, log_likelihood(similarities, 1.0), direction).mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(similarities.grad).all()


def test_every_kind_of_lm_score_equals_its_formula() -> None:
    sums, num_tokens = torch.tensor([[-6.0, -3.0], [-4.0, -2.0]]), torch.tensor([3, 2])
    expected = {
        "mean_logprob": [[-2, -1], [-2, -1]],
        "inverse_perplexity": [[math.exp(-2), math.exp(-1)], [math.exp(-2), math.exp(-1)]],
        "sum_logprob": [[-6, -3], [-4, -2]],
        "probability": [[math.exp(-6), math.exp(-3)], [math.exp(-4), math.exp(-2)]],
    }
    for kind, values in expected.items():
        torch.testing.assert_close(lm_scores(sums, num_tokens, kind), torch.tensor(values, dtype=torch.float32))
    assert set(expected) == set(losses.LM_SCORES) == {score.value for score in LMScore}


def test_the_entropy_of_known_distributions_is_exact() -> None:
    log_p = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64).log()
    assert entropy(log_p).tolist() == pytest.approx([1.5 * math.log(2), math.log(3)])


TWO_SCORES = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
TWO_LOG_Q = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).log()


def test_the_contrastive_term_is_info_nce_on_the_lms_best_document_among_its_own_and_others():
    of_second = math.log(1 + math.exp(3)) - 3
    others = torch.tensor([[0.5, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64)  # minus infinity is none
    expected = [math.log(math.exp(1) + math.exp(2) + math.exp(0.5)) - 1, of_second]
    assert contrastive_losses(TWO_SCORES, TWO_LOG_Q, others).tolist() == pytest.approx(expected)
