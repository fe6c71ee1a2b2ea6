"""REPLUG inference: one prediction from several documents (REPLUG, section 3.2).

p(y_t | x, y_<t) = sum over d of lambda_d p(y_t | d, x, y_<t), with lambda = softmax(similarities / temperature).
The paper has no temperature, which is 1. Probabilities are mixed, never logits. Pure arithmetic on numpy arrays, with
the records of the documents that an index, a few texts in memory or a search engine found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the log softmax over the last axis, in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mix_token_logprobs(token_logprobs: np.ndarray, similarities: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return log-probs [T] of the mixture, from log-probs [K, T] given each document and similarities [K]."""
    weights = log_softmax(np.asarray(similarities, dtype=np.float64) / temperature)
    weighted = np.asarray(token_logprobs, dtype=np.float64) + weights[:, None]
    largest = weighted.max(axis=0)
    return largest + np.log(np.exp(weighted - largest).sum(axis=0))


def document_weights(similarities: Sequence[float] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return weights [K] of documents: lambda, float64 of sum 1. Raises ValueError unless similarities are finite."""
    similarities = np.asarray(similarities, dtype=np.float64)
    if not np.isfinite(similarities).all():
        raise ValueError(f"similarities are {similarities.tolist()}; expected finite numbers")
    weights = np.exp(log_softmax(similarities / temperature)) if similarities.size else similarities
    return weights / weights.sum()


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A document that was found. Its weight is the ensemble's softmax of `similarity` among those found with it.

    `source` names the text that the document was cut from, where the retriever knows it.

    >>> lm = ReplugLM(StandInLM(), EncoderRetriever(Encoder("stand_in"), ["Basel lies on the Rhine."]), k=1)
    >>> found = [Retrieved("Nantes lies on the Loire.", similarity=0.8, id="nantes")]  # or lm.retrieve([text])[0]
    >>> lm.score("Its river is the", " Loire.", found).sum_logprob > lm.score("Its river is the", " Loire.").sum_logprob
    True
    """

    text: str
    similarity: float
    id: str
    source: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.similarity):
            raise ValueError(f"document {self.id} has the similarity {self.similarity}; expected a finite number")


class Retriever(Protocol):
    """Finds documents; the same query always finds the same.

    >>> class Shelf:
    ...     def retrieve(self, queries, k):
    ...         return [[Retrieved("Basel lies on the Rhine.", 1.0, "basel")][:k] for _ in queries]
    >>> ReplugLM(StandInLM(), Shelf(), k=1).retrieve(["Basel"])[0][0].id
    'basel'
    """

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Return up to `k` documents for each query, the most similar first."""
        ...
