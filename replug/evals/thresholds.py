"""Fit a threshold of a signal, such as popularity, below which to retrieve, and measure it on held-out questions.

A question retrieves if its value is below the threshold of its group, a relation or all questions. Candidates are
NEVER, every value observed in fitting, and ALWAYS; ties go to the lowest threshold (docs/adaptive.md). Thresholds
fitted to few questions generalise badly: a group with fewer than MIN_QUESTIONS uses the threshold of all questions, and
if these are too few as well, it is NEVER or ALWAYS. Pure.

With questions sorted by value a threshold is a position, the cut: questions before it retrieve, and their gain is a
prefix sum. So 1,000 resamples of 600 questions in 100 splits take seconds. All copies of a question in a resample are
on the same side of a split.

Letters: N questions, S splits, B resamples, G groups.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from replug.evals.intervals import percentile_interval, resample_counts

NEVER, ALWAYS = -np.inf, np.inf
NUM_SPLITS, FITTED_SHARE, NUM_RESAMPLES = 100, 0.75, 1000
NEVER_RETRIEVE, ALWAYS_RETRIEVE, ADAPTIVE, ORACLE = "never", "always", "adaptive", "oracle"
MIN_QUESTIONS = 50
OUT_OF_REACH = np.int32(1 << 30)  # above any possible gain


@dataclass(frozen=True, slots=True)
class Rule:
    """The values of a signal, and groups with a threshold each; questions are sorted by group, then value."""

    names: Sequence[str]  # [G]
    order: np.ndarray  # [N], the question at each position
    values: np.ndarray  # [N], sorted
    bounds: np.ndarray  # [G + 1], the position of each group's first question
    starts: np.ndarray  # [N], the position of the first question with the same group and value
    min_questions: int  # for a separate threshold of a group


# A policy's `accuracy`, the `share` of questions that retrieve, and the `gain` over the better of never and always, as
# values with intervals.
Worth = dict[str, dict[str, float]]


def rule_by(values: np.ndarray, groups: Sequence[str] | None = None, min_questions: int = MIN_QUESTIONS) -> Rule:
    """Return the rule with a threshold for each group [N]; None means one threshold for all questions."""
    names, codes = np.unique(np.asarray(groups or [""] * len(values)), return_inverse=True)
    order = np.lexsort((values, codes))
    values, codes = values[order], codes[order]
    is_first = np.concatenate([[True], (values[1:] != values[:-1]) | (codes[1:] != codes[:-1])])
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(values)), 0))
    return Rule(names.tolist(), order, values, np.searchsorted(codes, np.arange(len(names) + 1)), starts, min_questions)


def fit_thresholds(rule: Rule, closed: np.ndarray, augmented: np.ndarray) -> dict[str, float]:
    """Return the threshold of each group with the most right answers; `closed` and `augmented` [N] are 0 or 1.

    Groups with too few questions are left out and use the threshold of all questions. The group "", all questions, is
    always included.
    """
    gains, fitted = (augmented - closed)[rule.order], np.ones((1, len(rule.values)), np.int32)
    [cuts] = _cuts_with_pooled(rule, fitted, gains, _prefix_sums(gains[None]), _prefix_sums(fitted))
    thresholds = {}
    for name, start, stop, cut in zip(rule.names, rule.bounds[:-1], rule.bounds[1:], cuts, strict=True):
        if stop - start >= rule.min_questions or not name:
            thresholds[name] = NEVER if cut == start else ALWAYS if cut == stop else float(rule.values[cut])
    return thresholds


def draw_splits(num_questions: int, num_splits: int = NUM_SPLITS, seed: int = 0) -> np.ndarray:
    """Return a mask of the questions to fit to, bool [S, N]: 75% of them, with at least one on each side."""
    fitted = min(max(round(FITTED_SHARE * num_questions), 1), num_questions - 1)
    rng = np.random.default_rng([seed, 3])
    splits = np.zeros((num_splits, num_questions), dtype=bool)
    for split in splits:
        split[rng.permutation(num_questions)[:fitted]] = True
    return splits


def decisions(rule: Rule, closed: np.ndarray, augmented: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Return a mask of held-out questions that retrieve by the fitted thresholds, bool [S, N]."""
    fitted, gains = splits[:, rule.order].astype(np.int32), (augmented - closed)[rule.order]
    cuts = _cuts_with_pooled(rule, fitted, gains, _prefix_sums(fitted * gains), _prefix_sums(fitted))
    retrieved = np.empty_like(splits)
    retrieved[:, rule.order] = np.arange(len(gains)) < np.repeat(cuts, np.diff(rule.bounds), axis=1)
    return retrieved & ~splits


def accuracy_left_out(
    closed: np.ndarray, augmented: np.ndarray, retrieved: np.ndarray, splits: np.ndarray
) -> np.ndarray:
    """Return the rate of right answers per question [N] over splits that hold it out; NaN if none does."""
    right, times = np.where(retrieved, augmented, closed), (~splits).sum(axis=0)
    return np.divide((right * ~splits).sum(axis=0), times, out=np.full(len(times), np.nan), where=times > 0)


def mean_over_splits(values: np.ndarray, splits: np.ndarray) -> float:
    """Return the mean over splits of the mean over held-out questions; values [N] or [S, N]."""
    return float(np.mean(np.where(splits, 0, values).sum(axis=1) / (~splits).sum(axis=1)))


def measure(
    rule: Rule,
    closed: np.ndarray,
    augmented: np.ndarray,
    splits: np.ndarray,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[dict[str, Worth], str]:
    """Return the worth of never and always retrieving, of the rule and of an oracle; and the better of the first two.

    The oracle takes whichever answer is right.
    """
    once = _shares(rule, closed, augmented, splits, np.ones((1, len(closed))))
    better = max((NEVER_RETRIEVE, ALWAYS_RETRIEVE), key=lambda name: once[name][0][0])
    parts = [
        _shares(rule, closed, augmented, splits, counts) for counts in resample_counts(len(closed), num_resamples, seed)
    ]
    drawn = {name: [np.concatenate([part[name][which] for part in parts]) for which in (0, 1)] for name in once}
    worth = {
        name: {
            "accuracy": asdict(percentile_interval(float(right[0]), drawn[name][0])),
            "share": asdict(percentile_interval(float(retrieved[0]), drawn[name][1])),
            "gain": asdict(percentile_interval(float((right - once[better][0])[0]), drawn[name][0] - drawn[better][0])),
        }
        for name, (right, retrieved) in once.items()
    }
    return worth, better


def _shares(
    rule: Rule, closed: np.ndarray, augmented: np.ndarray, splits: np.ndarray, counts: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by policy the shares of right answers and of retrieving questions, [B] each, for counts [B, N]."""
    rest = (~splits).T.astype(np.float64)

    def mean_of(values: np.ndarray) -> np.ndarray:
        return _mean_of_splits((counts * values) @ rest, counts @ rest)

    oracle = np.maximum(closed, augmented)
    return {
        NEVER_RETRIEVE: (mean_of(closed), np.zeros(len(counts))),
        ALWAYS_RETRIEVE: (mean_of(augmented), np.ones(len(counts))),
        ADAPTIVE: refit(rule, closed, augmented, splits, counts),
        ORACLE: (mean_of(oracle), mean_of(oracle - closed)),
    }


def refit(
    rule: Rule, closed: np.ndarray, augmented: np.ndarray, splits: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares [B] of right answers and of retrieving questions, means over splits, for counts [B, N].

    Thresholds are refitted to the True side of each split [S, N] and measured on the other side; if a resample has no
    question to fit to, none retrieves.
    """
    gains = (augmented - closed)[rule.order].astype(np.int32)
    drawn = counts[:, rule.order].astype(np.int32)
    rest = (~splits).T.astype(np.float64)
    sizes, right = counts @ rest, (counts * closed) @ rest  # [B, S], as if none retrieved
    retrieved = np.zeros_like(sizes)
    all_gained, all_drawn = _prefix_sums(drawn * gains), _prefix_sums(drawn)
    for split, is_fitted in enumerate(splits[:, rule.order]):
        fitted = drawn * is_fitted
        gained, number = _prefix_sums(fitted * gains), _prefix_sums(fitted)
        cuts = _cuts_with_pooled(rule, fitted, gains, gained, number)
        right[:, split] += _before(all_gained, cuts, rule) - _before(gained, cuts, rule)
        retrieved[:, split] = _before(all_drawn, cuts, rule) - _before(number, cuts, rule)
    return _mean_of_splits(right, sizes), _mean_of_splits(retrieved, sizes)


def _mean_of_splits(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return means [B] over splits of sums / sizes [B, S], without splits that have no question to measure."""
    means = np.divide(sums, sizes, out=np.zeros_like(sums), where=sizes > 0)
    return means.sum(axis=1) / (sizes > 0).sum(axis=1)


def _prefix_sums(numbers: np.ndarray) -> np.ndarray:
    """Return prefix sums, int32 [B, N + 1] beginning with 0, of integers [B, N]."""
    sums = np.zeros((len(numbers), numbers.shape[1] + 1), dtype=np.int32)
    np.cumsum(numbers, axis=1, out=sums[:, 1:])
    return sums


def _cuts(rule: Rule, fitted: np.ndarray, gained: np.ndarray) -> np.ndarray:
    """Return the cut [B, G] before which each group retrieves, from counts [B, N] and prefix sums of their gains.

    Candidates are none, before each fitted value, and all; the largest gain wins, and ties go to the lowest.
    """
    candidates = np.take(gained, rule.starts, axis=1)
    candidates -= (fitted == 0) * OUT_OF_REACH  # 4 times as fast as `np.where`
    cuts = np.empty((len(fitted), len(rule.names)), dtype=np.int64)
    for group, (start, stop) in enumerate(zip(rule.bounds[:-1], rule.bounds[1:], strict=True)):
        best = candidates[:, start:stop].argmax(axis=1)
        gained_none, gained_all = gained[:, start], gained[:, stop]
        gained_best = np.maximum(candidates[np.arange(len(fitted)), start + best], gained_none)
        cuts[:, group] = np.where(gained_best > gained_none, rule.starts[start + best], start)
        cuts[gained_all > gained_best, group] = stop
    return cuts


def _cuts_with_pooled(
    rule: Rule, fitted: np.ndarray, gains: np.ndarray, gained: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """Return the cuts [B, G]; a group with too few questions to fit to uses the threshold of all questions."""
    cuts = _cuts(rule, fitted, gained)
    are_few = np.diff(number[:, rule.bounds], axis=1) < rule.min_questions  # [B, G]
    rows = np.flatnonzero(are_few.any(axis=1))
    if not len(rows):
        return cuts
    pooled = rule_by(rule.values)
    in_order = fitted[rows][:, pooled.order]
    places = _cuts(pooled, in_order, _prefix_sums(in_order * gains[pooled.order]))[:, 0]
    never_or_always = np.where(gained[rows, -1] > 0, len(rule.values), 0)
    places = np.where(number[rows, -1] < rule.min_questions, never_or_always, places)
    # If none retrieves, the threshold is the lowest value: no question is below it.
    thresholds = np.append(pooled.values, np.inf)[places]
    for group, (start, stop) in enumerate(zip(rule.bounds[:-1], rule.bounds[1:], strict=True)):
        own = are_few[rows, group]
        cuts[rows[own], group] = start + np.searchsorted(rule.values[start:stop], thresholds[own], side="left")
    return cuts


def _before(sums: np.ndarray, cuts: np.ndarray, rule: Rule) -> np.ndarray:
    """Return the sums [B] of all groups before their cuts [B, G], from prefix sums [B, N + 1]."""
    return (np.take_along_axis(sums, cuts, axis=1) - sums[:, rule.bounds[:-1]]).sum(axis=1)
