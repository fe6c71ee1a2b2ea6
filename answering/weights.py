"""Weights of a reranker's factors, fitted on the validation part of a set and on nothing else.

Deterministic coordinate search over a fixed grid. It is given what may be looked at, so it cannot see the test part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replug.answering.factors import Factors
from replug.answering.rerankers import Reranker, Weights, best_answer

GRID = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
MAX_ROUNDS = 10  # through all factors; it ends earlier where a round changes nothing


@dataclass(frozen=True, slots=True)
class GradedQuestion:
    """A validation question: its factors, and by answer what it would gain (exact match or accuracy, 0 to 1).

    A question without candidates gains nothing by any weights, and counts.
    """

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
    """The weights of the largest mean gain that changing one at a time finds, from the defaults on.

    Of equal gains the weights closest to the defaults are taken, so nothing changes for nothing; without questions the
    weights are the defaults. Raises ValueError for a question whose gains lack an answer.
    """
    weights, start = reranker.default_weights, _mean_gain(reranker, questions, reranker.default_weights)
    gain = start
    for _ in range(MAX_ROUNDS):
        before = dict(weights)
        for factor in reranker.factors:
            gain, weights = max(
                ((_mean_gain(reranker, questions, tried), tried) for tried in _variants(weights, factor)),
                key=lambda found: (found[0], -_distance(reranker, found[1])),
            )
        if weights == before:
            break
    return FittedWeights(weights, gain, start, len(questions))


def _variants(weights: Weights, factor: str) -> list[dict[str, float]]:
    """The weights themselves first, then with every other value of one; never all 0, which would tell no answers apart.

    The first of equals in gain and distance stays.
    """
    values = dict.fromkeys([weights[factor], *GRID])
    variants = [{**weights, factor: value} for value in values]
    return [variant for variant in variants if any(variant.values())]


def _distance(reranker: Reranker, weights: Weights) -> float:
    defaults = reranker.default_weights
    return sum(abs(weights[factor] - defaults[factor]) for factor in reranker.factors)


def _mean_gain(reranker: Reranker, questions: Sequence[GradedQuestion], weights: Weights) -> float:
    if not questions:
        return 0.0
    return float(np.mean([_gain(reranker, question, weights) for question in questions]))


def _gain(reranker: Reranker, question: GradedQuestion, weights: Weights) -> float:
    best = best_answer(reranker.score(question.factors, weights))
    if best and best not in question.gains:
        raise ValueError(f"the gains of a question lack its answer {best!r}; expected every candidate's")
    return question.gains[best] if best else 0.0
