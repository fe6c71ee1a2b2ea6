"""Below which value of a signal retrieval is used, by relation (Mallen et al. 2023, section 6.1). Pure.

A signal grows with the LM's own knowledge: who reads it the other way round, such as an entropy, negates it. A question
retrieves where its value is below the threshold. An unknown value is given as -inf: it retrieves unless nothing does.

Candidates are NEVER, every value observed in fitting, and ALWAYS; the paper's code tries 11 edges of bins instead,
which it computes from all questions, those of the test part included. Of thresholds that are equally right the lowest
is taken: it retrieves least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEVER, ALWAYS = -np.inf, np.inf


@dataclass(frozen=True, slots=True)
class Thresholds:
    """`by_relation` holds those of relations that were there in fitting; `pooled`, of all questions, is for others."""

    by_relation: dict[str, float]
    pooled: float

    def of(self, relation: str | None) -> float:
        return self.pooled if relation is None else self.by_relation.get(relation, self.pooled)


def fit_threshold(values: np.ndarray, closed: np.ndarray, augmented: np.ndarray) -> float:
    """The threshold with the most right answers, from values [N] and what is right (0 or 1) [N] each way.

    Raises ValueError where there are no questions.
    """
    if not len(values):
        raise ValueError("there are no questions to fit a threshold to")
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    gains = augmented[order].astype(np.int64) - closed[order].astype(np.int64)
    gained = np.concatenate([[0], np.cumsum(gains)])  # by the number of questions that retrieve
    starts = np.searchsorted(ordered, ordered, side="left")  # equal values retrieve together or not at all
    candidates = np.concatenate([[NEVER], ordered, [ALWAYS]])
    return float(candidates[np.argmax(np.concatenate([[0], gained[starts], gained[-1:]]))])


def fit_thresholds(
    values: np.ndarray, relations: Sequence[str], closed: np.ndarray, augmented: np.ndarray
) -> Thresholds:
    """One for each relation, and one of all questions together; arrays as `fit_threshold` takes them."""
    names = np.asarray(relations)
    by_relation = {}
    for relation in dict.fromkeys(relations):
        own = names == relation
        by_relation[relation] = fit_threshold(values[own], closed[own], augmented[own])
    return Thresholds(by_relation, fit_threshold(values, closed, augmented))


def retrieves(values: np.ndarray, relations: Sequence[str], thresholds: Thresholds) -> np.ndarray:
    """Which questions retrieve, bool [N]."""
    return values < np.array([thresholds.of(relation) for relation in relations])
