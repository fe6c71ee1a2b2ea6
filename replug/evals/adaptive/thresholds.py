"""Below which value of a signal retrieval is used, by relation (Mallen et al. 2023, section 6.1). Pure.

A signal grows with the LM's own knowledge: who reads it the other way round, such as an entropy, negates it. A question
retrieves where its value is below the threshold. An unknown value is given as -inf: it retrieves unless nothing does.

Candidates are NEVER, every value observed in fitting, and ALWAYS; the paper's code tries 11 edges of bins instead,
which it computes from all questions, those of the test part included. Of thresholds that are equally right the lowest
is taken: it retrieves least.

Thresholds fitted anew in every split of every resample, all resamples at once. Pure.

The thresholds are those of `evals.adaptive.thresholds`, question by question (a test compares the two). In questions
sorted by value a threshold is a place: what lies before it retrieves, and what that gains is a prefix sum. So a fit is
a sum and a maximum over a row of an array, and 1,000 resamples of 600 questions in 100 splits take seconds.

Letters: N questions, S splits, B resamples, G groups, which have a threshold each.
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


OUT_OF_REACH = np.int32(1 << 30)  # more than any number of questions gains


@dataclass(frozen=True, slots=True)
class RefittedShares:
    """The share of right answers, and of questions that retrieve, each float64 [B], means over the splits."""

    right: np.ndarray
    retrieved: np.ndarray


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Questions sorted by group, then by value."""

    order: np.ndarray  # [N]
    values: np.ndarray  # [N], sorted
    bounds: np.ndarray  # [G + 1], the place of each group's first question
    starts: np.ndarray  # [N], the place of the first question of the same group and value


def refit(
    values: np.ndarray,
    groups: Sequence[str],
    closed: np.ndarray,
    augmented: np.ndarray,
    splits: np.ndarray,
    counts: np.ndarray,
) -> RefittedShares:
    """What rules fitted to the True side of each split [S, N] are worth on the other, for resamples with counts [B, N].

    `values` [N], what is right each way int [N]. A group that nothing was fitted to has the threshold of all questions;
    where a resample leaves nothing at all to fit to, none retrieves.
    """
    by_group = _sorted(values, groups)
    gains = (augmented - closed)[by_group.order].astype(np.int32)
    drawn = counts[:, by_group.order].astype(np.int32)
    rest = (~splits).T.astype(np.float64)  # [N, S]
    sizes, right = counts @ rest, (counts * closed) @ rest  # [B, S], as if none retrieved
    retrieved = np.zeros_like(sizes)
    all_gained, all_drawn = _prefix_sums(drawn * gains), _prefix_sums(drawn)
    for split, is_fitted in enumerate(splits[:, by_group.order]):
        fitted = drawn * is_fitted
        gained, number = _prefix_sums(fitted * gains), _prefix_sums(fitted)
        cuts = _cuts(by_group, fitted, gained)
        _take_pooled(cuts, by_group, fitted, gains, number)
        right[:, split] += _before(all_gained, cuts, by_group) - _before(gained, cuts, by_group)
        retrieved[:, split] = _before(all_drawn, cuts, by_group) - _before(number, cuts, by_group)
    return RefittedShares(mean_of_splits(right, sizes), mean_of_splits(retrieved, sizes))


def mean_of_splits(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Means [B] of sums over sizes [B, S]; a split that leaves nothing of a resample to measure does not count."""
    means = np.divide(sums, sizes, out=np.zeros_like(sums), where=sizes > 0)
    return means.sum(axis=1) / (sizes > 0).sum(axis=1)


def _sorted(values: np.ndarray, groups: Sequence[str]) -> _Sorted:
    names, codes = np.unique(np.asarray(groups), return_inverse=True)
    order = np.lexsort((values, codes))
    values, codes = values[order], codes[order]
    is_first = np.concatenate([[True], (values[1:] != values[:-1]) | (codes[1:] != codes[:-1])])
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(values)), 0))
    return _Sorted(order, values, np.searchsorted(codes, np.arange(len(names) + 1)), starts)


def _prefix_sums(numbers: np.ndarray) -> np.ndarray:
    """Of integers [B, N]: int32 [B, N + 1], from 0 on."""
    sums = np.zeros((len(numbers), numbers.shape[1] + 1), dtype=np.int32)
    np.cumsum(numbers, axis=1, out=sums[:, 1:])
    return sums


def _cuts(places: _Sorted, fitted: np.ndarray, gained: np.ndarray) -> np.ndarray:
    """The place [B, G] before which each group retrieves, from counts [B, N] and their gains' prefix sums [B, N + 1].

    The lowest of those that gain most, of: none, before a value that was fitted to, all.
    """
    candidates = np.take(gained, places.starts, axis=1)
    candidates -= (fitted == 0) * OUT_OF_REACH  # a quarter of the time that `np.where` takes
    cuts = np.empty((len(fitted), len(places.bounds) - 1), dtype=np.int64)
    for group, (start, stop) in enumerate(zip(places.bounds[:-1], places.bounds[1:], strict=True)):
        best = candidates[:, start:stop].argmax(axis=1)
        of_none, of_all = gained[:, start], gained[:, stop]
        of_best = np.maximum(candidates[np.arange(len(fitted)), start + best], of_none)
        cuts[:, group] = np.where(of_best > of_none, places.starts[start + best], start)
        cuts[of_all > of_best, group] = stop
    return cuts


def _take_pooled(cuts: np.ndarray, places: _Sorted, fitted: np.ndarray, gains: np.ndarray, number: np.ndarray) -> None:
    """Where nothing of a group was fitted to, its place under the threshold of all questions."""
    nothing = np.diff(number[:, places.bounds], axis=1) == 0  # [B, G]
    rows = np.flatnonzero(nothing.any(axis=1))
    if not len(rows):
        return
    pooled = _sorted(places.values, [""] * len(places.values))
    in_order = fitted[rows][:, pooled.order]
    places_of_all = _cuts(pooled, in_order, _prefix_sums(in_order * gains[pooled.order]))[:, 0]
    # At none the lowest value there is: nothing lies below it.
    thresholds = np.append(pooled.values, np.inf)[places_of_all]
    for row, threshold in zip(rows, thresholds, strict=True):
        for group in np.flatnonzero(nothing[row]):
            start, stop = places.bounds[group], places.bounds[group + 1]
            cuts[row, group] = start + np.searchsorted(places.values[start:stop], threshold, side="left")


def _before(sums: np.ndarray, cuts: np.ndarray, places: _Sorted) -> np.ndarray:
    """What prefix sums [B, N + 1] add up to before the cuts [B, G] of all groups, [B]."""
    return (np.take_along_axis(sums, cuts, axis=1) - sums[:, places.bounds[:-1]]).sum(axis=1)
