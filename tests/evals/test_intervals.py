"""Ratios of sums against known distributions, the bootstrap against a naive one, and policies of when to retrieve."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replug.evals import adaptive, intervals
from replug.evals.adaptive import (
    ALWAYS,
    NEVER,
    best_threshold,
    decisions,
    draw_splits,
    fit_thresholds,
    means_left_out,
    measure_pair,
    read_answered,
)
from replug.evals.folder import EvaluationFolder
from replug.evals.intervals import (
    Clusters,
    Ratio,
    difference_and_p,
    holm,
    interval_of,
    interval_of_shares,
    value_of,
    wilson_interval,
)
from tests.support.outcome_folders import made_up_rows, write_evaluation


def mean_of(values: np.ndarray) -> Ratio:
    return Ratio(values, np.ones(len(values)))


def naive_values(ratios: list[Ratio], num_resamples: int, seed: int) -> np.ndarray:
    rng, num = np.random.default_rng(seed), len(ratios[0].numerators)
    rows = [rng.integers(num, size=num) for _ in range(num_resamples)]
    return np.array(
        [[r.transform(r.numerators[some].sum() / r.denominators[some].sum()) for r in ratios] for some in rows]
    )


def test_intervals_equal_those_of_a_naive_paired_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 100, size=30)
    base = tokens * rng.uniform(2, 6, size=30)
    two_methods = Ratio(base - rng.random(30) * tokens, tokens, np.exp2), Ratio(base, tokens, np.exp2)
    naive = naive_values(list(two_methods), 400, seed=7)
    monkeypatch.setattr(intervals, "CHUNK_COUNTS", 7 * 30)  # 57 chunks of 7 and one of 1
    for place, ratio in enumerate(two_methods):
        found = interval_of(ratio, 400, seed=7)
        assert (found.low, found.high) == pytest.approx(tuple(np.percentile(naive[:, place], [2.5, 97.5])))
        assert found.value == value_of(ratio)
    found = difference_and_p(*two_methods, 400, seed=7)[0]
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(naive[:, 0] - naive[:, 1], [2.5, 97.5])))
    assert found.value == pytest.approx(value_of(two_methods[0]) - value_of(two_methods[1]))


@pytest.mark.filterwarnings("error")
def test_resamples_of_texts_without_words_are_left_out() -> None:
    bits, words = np.array([5.0, 3.0, 4.0]), np.array([0, 2, 2])
    found = interval_of(Ratio(bits, words), 200)
    assert (found.value, found.low) == (3, 1.5)
    assert 1.5 < found.high <= (5 + 5 + 4) / 2
    assert np.isfinite(difference_and_p(Ratio(bits, words), Ratio(bits + 1, words), 200)[0].high)


def test_wilsons_interval_is_the_known_one() -> None:
    for right, num, low, high in ((0, 10, 0.0, 0.2775), (1, 1, 0.2065, 1.0), (81, 263, 0.2553, 0.3662)):
        found = wilson_interval(right, num)
        assert (found.value, found.low, found.high) == pytest.approx((right / num, low, high), abs=5e-5)


# Clusters and strata --------------------------------------------------------------------------------------------------


def examples_of_texts(seed: int, num_texts: int = 64, num_examples: int = 39, correlation: float = 0.2) -> np.ndarray:
    """Values [texts, examples] of mean 0 and variance 1; those of one text are correlated."""
    rng = np.random.default_rng(seed)
    of_text = rng.normal(size=(num_texts, 1)) * np.sqrt(correlation)
    return of_text + rng.normal(size=(num_texts, num_examples)) * np.sqrt(1 - correlation)


def covers(values: np.ndarray, clusters: Clusters | None) -> bool:
    found = interval_of(mean_of(values.ravel()), 200 if clusters else 100, clusters=clusters)
    return found.low <= 0 <= found.high


def test_the_interval_of_clusters_covers_the_truth_95_times_in_100_and_that_of_examples_does_not() -> None:
    texts = Clusters.by_name(np.repeat(np.arange(64), 39).tolist())
    assert 0.90 <= np.mean([covers(examples_of_texts(seed), texts) for seed in range(160)]) <= 0.98
    assert np.mean([covers(examples_of_texts(seed), None) for seed in range(20)]) < 0.75


def test_what_differs_between_strata_alone_does_not_widen_the_interval() -> None:
    right = np.array([1.0] * 50 + [0.0] * 49 + [1.0])
    subjects = Clusters.by_name(list(range(100)), ["easy"] * 50 + ["hard"] * 50)
    stratified, drawn = (interval_of(mean_of(right), 2000, clusters=c) for c in (subjects, None))
    assert stratified.high - stratified.low < 0.3 * (drawn.high - drawn.low)


def test_a_share_of_clusters_or_strata_has_a_bootstraps_interval_unless_that_has_no_width() -> None:
    right = Ratio(np.array([1.0, 0.0, 1.0, 1.0]), np.ones(4))
    two = Clusters.by_name([0, 0, 1, 1])
    assert interval_of_shares(right, 300, clusters=two) == interval_of(right, 300, clusters=two)
    of_subjects = Clusters.by_name(list(range(4)), ["a", "b", "a", "a"])
    assert interval_of_shares(right, 300, clusters=of_subjects) == wilson_interval(3, 4)


def test_holms_p_values_are_the_known_ones() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_a_p_value_is_below_one_in_twenty_where_the_interval_is_without_zero() -> None:
    decided = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        a = rng.normal(0.2, 1, size=100)
        interval, p = difference_and_p(mean_of(a), mean_of(np.zeros(100)), 999)
        decided += interval.low > 0
        assert (p < 0.05) == (interval.low > 0 or interval.high < 0)
    assert 10 < decided < 50
    clear = np.random.default_rng(0).normal(3, 1, size=100)
    assert difference_and_p(mean_of(clear), mean_of(np.zeros(100)), 100)[1] < 1e-6, "resamples do not bound it"


# The policy of when to retrieve: thresholds against brute force -------------------------------------------------------


def test_the_policy_lies_between_never_and_the_oracle_and_costs_what_its_questions_cost(tmp_path):
    made_up = read_answered([EvaluationFolder(write_evaluation(tmp_path / "one", made_up_rows()))])["one"]
    measured = measure_pair(made_up.relations, made_up.methods["none"], made_up.methods["replug@1"])
    by = measured["policies"]
    assert list(by) == ["never", "always", "adaptive", "oracle"]
    share = by["adaptive"]["share"]["value"]
    assert by["never"]["share"]["value"] == 0 < share < by["always"]["share"]["value"] == 1
    best = by[measured["better"]]["accuracy"]["value"]
    assert best < by["adaptive"]["accuracy"]["value"] < by["oracle"]["accuracy"]["value"]
    assert all(of["accuracy"]["low"] <= of["accuracy"]["value"] <= of["accuracy"]["high"] for of in by.values())
    assert by[measured["better"]]["gain"] == {"value": 0, "low": 0, "high": 0}
    assert by["never"]["costs"]["prompt_tokens"] == 240 and by["oracle"]["costs"] == {}
    assert by["adaptive"]["costs"]["retriever_calls"] == pytest.approx(share)
    assert by["adaptive"]["costs"]["prompt_tokens"] == pytest.approx(240 + share * (700 - 240))


# Few different values, so that many are equal.
QUESTION = st.tuples(st.sampled_from([0.0, 1.0, 2.0, 3.5, 1000.0]), st.integers(-1, 1))


def brute_force(values: Sequence[float], gains: Sequence[int]) -> float:
    """Every candidate in turn, the lowest first; the first that no other surpasses."""
    gained = {}
    for threshold in [NEVER, *sorted(set(values)), ALWAYS]:
        gained[threshold] = sum(gain for value, gain in zip(values, gains, strict=True) if value < threshold)
    return next(threshold for threshold, gain in gained.items() if gain == max(gained.values()))


@given(st.lists(QUESTION, min_size=1, max_size=12))
def test_thresholds_are_those_of_brute_force_with_ties(rows):
    values, gains = zip(*rows, strict=True)
    assert best_threshold(np.array(values), np.array(gains)) == brute_force(values, gains)


def test_few_questions_have_the_threshold_of_all(monkeypatch: pytest.MonkeyPatch):
    """Unpopular entities need documents, but in the small relation it is the other way round: chance, of so few."""
    monkeypatch.setattr(adaptive, "MIN_QUESTIONS", 6)
    values, relations = np.array([*range(6), 0, 5]), np.array([*"aaaaaa", *"bb"])
    gains = np.array([1, 1, 1, -1, -1, -1, -1, 1])
    assert fit_thresholds(relations, values, gains) == {"a": 3.0, "others": 3.0}
    splits = np.array([[True] * 6 + [False] * 2])
    assert decisions(relations, values, gains, splits)[0, 6:].tolist() == [True, False]


def questions(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Relations, popularities, some of them equal, and gains: the LM knows what is popular."""
    rng = np.random.default_rng(seed)
    popularity = np.round(10 ** rng.uniform(1, 5, num), -1)
    knows = rng.random(num) < (np.log10(popularity) - 1) / 4
    return rng.choice(list("abcd"), num), popularity, (rng.random(num) < 0.5).astype(int) - knows


def test_the_answers_of_the_test_part_change_no_decision():
    relations, popularity, gains = questions(200)
    rng = np.random.default_rng(5)
    for split in draw_splits(200, 10):
        changed = np.where(split, gains, rng.permutation(1 - gains))
        assert (
            decisions(relations, popularity, changed, split[None])
            == decisions(relations, popularity, gains, split[None])
        ).all()


def test_what_is_measured_is_the_mean_over_splits_of_held_out_questions():
    splits, rng = draw_splits(40, 6), np.random.default_rng(0)
    counts = np.stack([np.ones(40), rng.multinomial(40, [1 / 40] * 40)])
    for values in (rng.random(40), rng.random((6, 40))):
        found = means_left_out(values, splits, counts)
        for drawn, mean in zip(counts.astype(int), found, strict=True):
            each = np.broadcast_to(values, splits.shape)
            means = [np.repeat(of[~split], drawn[~split]).mean() for of, split in zip(each, splits, strict=True)]
            assert mean == pytest.approx(np.mean(means)) and math.isfinite(mean)
