"""REPLUG inference: one prediction from several documents (REPLUG, section 3.2).

p(y_t | x, y_<t) = sum over d of lambda_d p(y_t | d, x, y_<t), with lambda = softmax(similarities / temperature).
The paper has no temperature, which is 1. Probabilities are mixed, never logits. Pure arithmetic on numpy arrays.
Where only finished answers and their probabilities are seen, as behind a server, the answers are summed instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """log softmax over the last axis, in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mix_token_logprobs(token_logprobs: np.ndarray, similarities: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs [T] of the mixture, from log-probs [K, T] given each document and similarities [K]."""
    weights = log_softmax(np.asarray(similarities, dtype=np.float64) / temperature)
    weighted = np.asarray(token_logprobs, dtype=np.float64) + weights[:, None]
    largest = weighted.max(axis=0)
    return largest + np.log(np.exp(weighted - largest).sum(axis=0))


def document_weights(similarities: Sequence[float] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Weights [K] of documents, float64 of sum 1: lambda. Raises ValueError for similarities that are not finite."""
    similarities = np.asarray(similarities, dtype=np.float64)
    if not np.isfinite(similarities).all():
        raise ValueError(f"similarities are {similarities.tolist()}; expected finite numbers")
    weights = np.exp(log_softmax(similarities / temperature)) if similarities.size else similarities
    return weights / weights.sum()


@dataclass(frozen=True, slots=True)
class HeaviestAnswer:
    """`prompt` is the first that gave it, `logprob` (nats) its log-probability, `share` its part of all answers'."""

    prompt: int
    logprob: float
    share: float


def ensemble_answers(
    answers: Sequence[str], sum_logprobs: Sequence[float], weights: Sequence[float]
) -> HeaviestAnswer | None:
    """The heaviest of K answers, each weighing its prompt's weight times its own likelihood (nats in).

    Answers that are equal but for white space round them are one, and weigh their sum; of those that weigh the same,
    the one whose prompt comes first. An empty answer has no tokens to be weighed by and does not count: None where
    no answer weighs anything.
    """
    texts = [answer.strip() for answer in answers]
    with np.errstate(divide="ignore"):  # a weight of 0 is a log weight of minus infinity
        logs = np.log(np.asarray(weights, dtype=np.float64)) + np.asarray(sum_logprobs, dtype=np.float64)
    logs[[not text for text in texts]] = -np.inf
    if not np.isfinite(logs).any():
        return None
    masses = {text: np.logaddexp.reduce(logs[[other == text for other in texts]]) for text in texts}
    best = max(masses, key=lambda text: masses[text])
    share = np.exp(masses[best] - np.logaddexp.reduce(logs))
    return HeaviestAnswer(texts.index(best), float(masses[best]), float(share))
