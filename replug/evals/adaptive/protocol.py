"""What a policy is worth on questions it was not fitted to (Mallen et al. 2023, section 6.1). Pure.

Questions are split at random, 100 times: thresholds are fitted to 75% and applied to the other 25%, and what is
measured there is averaged over the splits. All policies are measured on the same splits. Intervals come from a
bootstrap over questions that fits anew in every resample. A question drawn twice lies on one side of a split with all
its copies, so that nothing is measured on what it was fitted to.

Letters: N questions, S splits, B resamples, R relations.

How well a signal tells right answers from wrong ones: the area under the ROC curve. Pure.

What answers cost, and what a policy costs that answers some questions one way and some the other. Pure.

Costs are means over questions. A number that was not measured is NaN, and so is every mean that needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from replug.evals.adaptive.thresholds import (
    RefittedShares,
    fit_threshold,
    fit_thresholds,
    mean_of_splits,
    refit,
    retrieves,
)
from replug.evals.intervals import Interval, percentile_interval, resample_counts


def auroc(values: np.ndarray, is_right: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """The chance that a right answer has a higher value than a wrong one; equal values count half.

    `values` [N] and `is_right` [N]; `counts` [B, N] say how often each question is drawn in B resamples, and without
    them each is there once. Returns [B], NaN where all answers are right or none is.
    """
    counts = np.ones((1, len(values))) if counts is None else np.asarray(counts, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    ordered, right = values[order], np.asarray(is_right, dtype=bool)[order]
    drawn = counts[:, order]
    wrong_before = np.zeros((len(drawn), len(values) + 1))
    np.cumsum(drawn * ~right, axis=1, out=wrong_before[:, 1:])
    below = wrong_before[:, np.searchsorted(ordered, ordered, side="left")]
    up_to = wrong_before[:, np.searchsorted(ordered, ordered, side="right")]
    pairs = (drawn * right).sum(axis=1) * wrong_before[:, -1]
    won = (drawn * right * (below + up_to)).sum(axis=1) / 2
    return np.divide(won, pairs, out=np.full(len(drawn), np.nan), where=pairs > 0)


NUM_SPLITS, FITTED_SHARE = 100, 0.75
NUM_RESAMPLES = 1000
NEVER_RETRIEVE, ALWAYS_RETRIEVE, ORACLE = "never", "always", "oracle"


@dataclass(frozen=True, slots=True)
class Questions:
    """The relations of N questions, and whether the answer is right (0 or 1) each way, int64 [N]."""

    relations: tuple[str, ...]
    closed: np.ndarray
    augmented: np.ndarray


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to decide: by values [N] of a signal (high where the LM knows; unknown: -inf), under the threshold of each
    relation or under one for all."""

    values: np.ndarray
    by_relation: bool = True


@dataclass(frozen=True, slots=True)
class Worth:
    """A policy with intervals: accuracy, share that retrieves, and accuracy above `better` (never or always)."""

    accuracy: Interval
    share: Interval
    gain: Interval
    better: str


def draw_splits(num_questions: int, num_splits: int = NUM_SPLITS, seed: int = 0) -> np.ndarray:
    """Which questions are fitted to, bool [S, N]: 75% of them, one at least left on each side."""
    fitted = min(max(round(FITTED_SHARE * num_questions), 1), num_questions - 1)
    rng = np.random.default_rng([seed, 3])
    splits = np.zeros((num_splits, num_questions), dtype=bool)
    for split in splits:
        split[rng.permutation(num_questions)[:fitted]] = True
    return splits


def decisions(questions: Questions, rule: Rule, splits: np.ndarray) -> np.ndarray:
    """Which questions retrieve by what was fitted to the others, bool [S, N]; False for those that were fitted to."""
    retrieved = np.zeros(splits.shape, dtype=bool)
    for row, fitted in enumerate(splits):
        rest = np.flatnonzero(~fitted)
        retrieved[row, rest] = _decide(questions, rule, np.flatnonzero(fitted), rest)
    return retrieved


def accuracy_left_out(questions: Questions, rule: Rule, splits: np.ndarray) -> np.ndarray:
    """How often each question is answered right, [N], over the splits that do not fit to it; NaN where all do."""
    right = np.where(decisions(questions, rule, splits), questions.augmented, questions.closed)
    times = (~splits).sum(axis=0)
    return np.divide((right * ~splits).sum(axis=0), times, out=np.full(len(times), np.nan), where=times > 0)


def _decide(questions: Questions, rule: Rule, fitted: np.ndarray, rest: np.ndarray) -> np.ndarray:
    values, right = rule.values, (questions.closed[fitted], questions.augmented[fitted])
    if not rule.by_relation:
        return values[rest] < fit_threshold(values[fitted], *right)
    thresholds = fit_thresholds(values[fitted], [questions.relations[row] for row in fitted], *right)
    return retrieves(values[rest], [questions.relations[row] for row in rest], thresholds)


def mean_over_splits(values: np.ndarray, splits: np.ndarray) -> float:
    """The mean over splits of the mean over the questions that were not fitted to; values [N] or [S, N]."""
    return float(np.mean(np.where(splits, 0, values).sum(axis=1) / (~splits).sum(axis=1)))


def measure(
    questions: Questions,
    rules: Mapping[str, Rule],
    splits: np.ndarray,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> dict[str, Worth]:
    """The worth of each rule, and of never and always retrieving and of an oracle that takes the better answer."""
    once = _rates(questions, rules, splits, np.ones((1, len(questions.relations))))
    better = max((NEVER_RETRIEVE, ALWAYS_RETRIEVE), key=lambda name: once[name].right[0])
    parts = [
        _rates(questions, rules, splits, counts)
        for counts in resample_counts(len(questions.relations), num_resamples, seed)
    ]
    right = {name: np.concatenate([part[name].right for part in parts]) for name in once}
    retrieved = {name: np.concatenate([part[name].retrieved for part in parts]) for name in once}
    return {
        name: Worth(
            percentile_interval(float(of.right[0]), right[name]),
            percentile_interval(float(of.retrieved[0]), retrieved[name]),
            percentile_interval(float((of.right - once[better].right)[0]), right[name] - right[better]),
            better,
        )
        for name, of in once.items()
    }


def signal_auroc(
    values: np.ndarray, is_right: np.ndarray, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval | None:
    """How well values [N] tell right answers from wrong ones, of those that are known; None where all are the same."""
    known = np.isfinite(values)
    values, is_right = values[known], is_right[known]
    if not len(values) or is_right.min() == is_right.max():
        return None
    drawn = [auroc(values, is_right, counts) for counts in resample_counts(len(values), num_resamples, seed)]
    resampled = np.concatenate(drawn)
    return percentile_interval(float(auroc(values, is_right)[0]), resampled[np.isfinite(resampled)])


def _rates(
    questions: Questions, rules: Mapping[str, Rule], splits: np.ndarray, counts: np.ndarray
) -> dict[str, RefittedShares]:
    """Return what each rule is worth in resamples with counts [B, N] of each question."""
    closed, augmented, rest = questions.closed, questions.augmented, (~splits).T.astype(np.float64)

    def shares(values: np.ndarray) -> np.ndarray:
        """Means [B] over splits of the means of values [N] over the questions that were not fitted to."""
        return mean_of_splits((counts * values) @ rest, counts @ rest)

    oracle = np.maximum(closed, augmented)
    by_name = {
        NEVER_RETRIEVE: RefittedShares(shares(closed), np.zeros(len(counts))),
        ALWAYS_RETRIEVE: RefittedShares(shares(augmented), np.ones(len(counts))),
        ORACLE: RefittedShares(shares(oracle), shares(oracle - closed)),
    }
    for name, rule in rules.items():
        groups = questions.relations if rule.by_relation else ("",) * len(questions.relations)
        by_name[name] = refit(rule.values, groups, closed, augmented, splits, counts)
    return by_name


PER_MILLION, QUESTIONS_OF_A_PRICE = 1e6, 1000


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for a million tokens of prompts, and for a million that are generated."""

    prompt: float
    generated: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a question: calls of the LM and of the retriever, tokens, and seconds from the question to its answer."""

    lm_calls: float
    retriever_calls: float
    prompt_tokens: float
    generated_tokens: float
    seconds: float

    def dollars(self, prices: Prices) -> float:
        """Return the dollars that a thousand questions cost."""
        tokens = self.prompt_tokens * prices.prompt + self.generated_tokens * prices.generated
        return tokens / PER_MILLION * QUESTIONS_OF_A_PRICE


COUNTED = ("lm_calls", "retriever_calls", "prompt_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class WayCosts:
    """Of one way to answer: by name what is counted of each question [N], and the mean seconds of a question.

    `search_seconds` are those of them in which documents are found.
    """

    counted: Mapping[str, np.ndarray]
    seconds: float
    search_seconds: float

    def mean(self) -> Costs:
        return Costs(**{name: float(np.mean(self.counted[name])) for name in COUNTED}, seconds=self.seconds)


def policy_costs(
    closed: WayCosts, augmented: WayCosts, retrieved: np.ndarray, splits: np.ndarray, asks_first: bool, searches: bool
) -> Costs:
    """Of a policy that retrieves where `retrieved` [S, N] says, over what `splits` [S, N] left to measure.

    `asks_first`: the signal is the closed-book answer's, which is paid for by who retrieves too. `searches`: it is the
    retriever's, so every question is searched for.
    """
    share = mean_over_splits(retrieved, splits)
    counted = {}
    for name in COUNTED:
        first = closed.counted[name] if asks_first else 0
        searched = augmented.counted[name] if searches and name == "retriever_calls" else 0
        each = np.where(retrieved, augmented.counted[name] + first, closed.counted[name] + searched)
        counted[name] = mean_over_splits(each, splits)
    without_documents = closed.seconds + (augmented.search_seconds if searches else 0)
    with_documents = augmented.seconds + (closed.seconds if asks_first else 0)
    return Costs(**counted, seconds=(1 - share) * without_documents + share * with_documents)
