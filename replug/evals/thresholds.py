"""Fit below which value of a signal, such as popularity, documents are retrieved, and measure it on other questions.

A question retrieves if its value is below the threshold of its group, a relation or all questions. Candidates are
NEVER, every value observed in fitting, and ALWAYS; of thresholds that are equally right the lowest is taken
(docs/adaptive.md). A threshold that is fitted to few questions loses on others: a group with fewer than MIN_QUESTIONS
has that of all questions, and where all are as few, it is NEVER or ALWAYS. Pure.

In questions sorted by value a threshold is a place, the cut: what lies before it retrieves, and what that gains is a
prefix sum. So 1,000 resamples of 600 questions in 100 splits take seconds. A question that a resample draws twice lies
on one side of a split with all its copies.

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
OUT_OF_REACH = np.int32(1 << 30)  # more than any number of questions gains


@dataclass(frozen=True, slots=True)
class Rule:
    """The values of a signal, and the groups that have a threshold each; questions are sorted by group, then value."""

    names: Sequence[str]  # [G]
    order: np.ndarray  # [N], which question stands at a place
    values: np.ndarray  # [N], sorted
    bounds: np.ndarray  # [G + 1], the place of each group's first question
    starts: np.ndarray  # [N], the place of the first question of the same group and value
    min_questions: int  # that a group has a threshold of its own for


# Of a policy its `accuracy`, the `share` of questions that retrieve, and its `gain` over the better of never and
# always, each a value with its interval.
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

    Groups with too few questions are left out: theirs is that of all questions, which is never left out.
    """
    gains, fitted = (augmented - closed)[rule.order], np.ones((1, len(rule.values)), np.int32)
    [cuts] = _cuts_with_pooled(rule, fitted, gains, _prefix_sums(gains[None]), _prefix_sums(fitted))
    thresholds = {}
    for name, start, stop, cut in zip(rule.names, rule.bounds[:-1], rule.bounds[1:], cuts, strict=True):
        if stop - start >= rule.min_questions or not name:
            thresholds[name] = NEVER if cut == start else ALWAYS if cut == stop else float(rule.values[cut])
    return thresholds


def draw_splits(num_questions: int, num_splits: int = NUM_SPLITS, seed: int = 0) -> np.ndarray:
    """Return which questions are fitted to, bool [S, N]: 75% of them, at least one left on each side."""
    fitted = min(max(round(FITTED_SHARE * num_questions), 1), num_questions - 1)
    rng = np.random.default_rng([seed, 3])
    splits = np.zeros((num_splits, num_questions), dtype=bool)
    for split in splits:
        split[rng.permutation(num_questions)[:fitted]] = True
    return splits


def decisions(rule: Rule, closed: np.ndarray, augmented: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Return which questions retrieve by thresholds fitted to the others, bool [S, N]; False for those fitted to."""
    fitted, gains = splits[:, rule.order].astype(np.int32), (augmented - closed)[rule.order]
    cuts = _cuts_with_pooled(rule, fitted, gains, _prefix_sums(fitted * gains), _prefix_sums(fitted))
    retrieved = np.empty_like(splits)
    retrieved[:, rule.order] = np.arange(len(gains)) < np.repeat(cuts, np.diff(rule.bounds), axis=1)
    return retrieved & ~splits


def accuracy_left_out(
    closed: np.ndarray, augmented: np.ndarray, retrieved: np.ndarray, splits: np.ndarray
) -> np.ndarray:
    """Return how often each question is answered right, [N], over splits that do not fit to it; NaN where all do."""
    right, times = np.where(retrieved, augmented, closed), (~splits).sum(axis=0)
    return np.divide((right * ~splits).sum(axis=0), times, out=np.full(len(times), np.nan), where=times > 0)


def mean_over_splits(values: np.ndarray, splits: np.ndarray) -> float:
    """Return the mean over splits of the mean over the questions not fitted to; values [N] or [S, N]."""
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
    """Return by policy the share of right answers and of questions that retrieve, [B] each, given counts [B, N]."""
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

    Thresholds are fitted anew to the True side of each split [S, N] and measured on the other; where a resample leaves
    nothing at all to fit to, none retrieves.
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
    """Return means [B] of sums over sizes [B, S]; a split that leaves nothing of a resample to measure is left out."""
    means = np.divide(sums, sizes, out=np.zeros_like(sums), where=sizes > 0)
    return means.sum(axis=1) / (sizes > 0).sum(axis=1)


def _prefix_sums(numbers: np.ndarray) -> np.ndarray:
    """Return int32 [B, N + 1], from 0 on, of integers [B, N]."""
    sums = np.zeros((len(numbers), numbers.shape[1] + 1), dtype=np.int32)
    np.cumsum(numbers, axis=1, out=sums[:, 1:])
    return sums


def _cuts(rule: Rule, fitted: np.ndarray, gained: np.ndarray) -> np.ndarray:
    """Return the place [B, G] before which each group retrieves, from counts [B, N] and prefix sums of their gains.

    The lowest of those that gain most, of: none, before a value that was fitted to, all.
    """
    candidates = np.take(gained, rule.starts, axis=1)
    candidates -= (fitted == 0) * OUT_OF_REACH  # a quarter of the time that `np.where` takes
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
    """Return the cuts [B, G]; a group with few to fit to has its place under the threshold of all questions."""
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
    # If none retrieves, the threshold is the lowest value that exists: nothing lies below it.
    thresholds = np.append(pooled.values, np.inf)[places]
    for group, (start, stop) in enumerate(zip(rule.bounds[:-1], rule.bounds[1:], strict=True)):
        own = are_few[rows, group]
        cuts[rows[own], group] = start + np.searchsorted(rule.values[start:stop], thresholds[own], side="left")
    return cuts


def _before(sums: np.ndarray, cuts: np.ndarray, rule: Rule) -> np.ndarray:
    """Return [B] what prefix sums [B, N + 1] add up to before the cuts [B, G] of all groups."""
    return (np.take_along_axis(sums, cuts, axis=1) - sums[:, rule.bounds[:-1]]).sum(axis=1)
