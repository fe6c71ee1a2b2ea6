"""Ratios of sums against known distributions, and the bootstrap against a naive one."""

import numpy as np
import pytest

from replug.evals import intervals
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


def mean_of(values: np.ndarray) -> Ratio:
    return Ratio(values, np.ones(len(values)))


def naive_values(ratios: list[Ratio], num_resamples: int, seed: int) -> np.ndarray:
    rng, num = np.random.default_rng(seed), len(ratios[0].numerators)
    rows = [rng.integers(num, size=num) for _ in range(num_resamples)]
    return np.array(
        [[r.transform(r.numerators[some].sum() / r.denominators[some].sum()) for r in ratios] for some in rows]
    )


@pytest.fixture
def two_methods() -> tuple[Ratio, Ratio]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 100, size=30)
    base = tokens * rng.uniform(2, 6, size=30)
    return Ratio(base - rng.random(30) * tokens, tokens, np.exp2), Ratio(base, tokens, np.exp2)


def test_intervals_equal_those_of_a_naive_paired_bootstrap(
    two_methods: tuple[Ratio, Ratio], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("num_right", "num_all", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilsons_interval_is_the_known_one(num_right: int, num_all: int, low: float, high: float) -> None:
    found = wilson_interval(num_right, num_all)
    assert (found.value, found.low, found.high) == pytest.approx((num_right / num_all, low, high), abs=5e-5)


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
