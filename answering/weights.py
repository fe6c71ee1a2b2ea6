"""Weights of a reranker's factors, fitted on the validation part of a set and on nothing else.

Deterministic coordinate search over a fixed grid. It is given what may be looked at, so it cannot see the test part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replug.answering.factors import Factors
from replug.answering.rerankers import Reranker


@dataclass(frozen=True, slots=True)
class GradedQuestion:
    """A validation question: its factors, and by answer what it would gain (exact match or accuracy, 0 to 1)."""

    factors: Factors
    gains: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """`weights` by factor, the mean gain with them and with the default ones, and of how many questions."""

    weights: Mapping[str, float]
    gain: float
    default_gain: float
    num_questions: int


def fit_weights(reranker: Reranker, questions: Sequence[GradedQuestion]) -> FittedWeights:
    """The weights of the largest mean gain; of equals those closest to the defaults, which no questions leave."""
    raise NotImplementedError
