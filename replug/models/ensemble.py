"""REPLUG inference: one prediction from several documents (REPLUG, section 3.2).

p(y_t | x, y_<t) = sum over d of lambda_d p(y_t | d, x, y_<t), with lambda = softmax(similarities / temperature).
The paper has no temperature, which is 1. Probabilities are mixed, never logits. Pure arithmetic on numpy arrays.
"""

from collections.abc import Sequence

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
