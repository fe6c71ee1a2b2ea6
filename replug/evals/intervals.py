"""Metrics as ratios of sums over examples, and their 95% intervals by a paired bootstrap over clusters. Pure.

value = transform(sum of numerators / sum of denominators), so that long texts weigh more where they should. An interval
of a difference draws the same examples for both methods.

Examples of one text are correlated, so the bootstrap draws texts (`tests/evals/test_intervals.py`). Subjects, as in
MMLU, are strata: each keeps its number of clusters in every resample. With fewer than FEW_CLUSTERS bootstrap
percentiles are too narrow (Cameron, Gelbach and Miller 2008); with fewer than FEWEST_CLUSTERS no difference is shown.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]
NORMAL_QUANTILE = 1.959963984540054  # 97.5% of a standard normal distribution lie below
CHUNK_COUNTS = 1 << 18  # entries of a matrix of counts: 2 MiB, which stay in the cache
FEW_CLUSTERS = 20
FEWEST_CLUSTERS = 6  # with 5, all signs agree by chance in 2 / 2^5 > 1/20 of cases
DIGITS = 5  # decimals: a difference printed as 0.00000 is rounding
LEVEL = 0.05
NO_DIFFERENCE = "no difference shown"


def bits_of(token_logprobs: np.ndarray) -> float:
    """Return the bits of a text, the sum of -log2 p, from the log-probs (nats) of its tokens."""
    return float(-np.asarray(token_logprobs, dtype=np.float64).sum() / math.log(2))


def identity(values: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True)
class Ratio:
    """Finite numerators [N] and denominators [N] of N examples; denominators are 0 or more, and some above 0."""

    numerators: np.ndarray
    denominators: np.ndarray
    transform: Transform = identity


@dataclass(frozen=True)
class Clusters:
    """Examples to draw together: the cluster [N] of each, from 0, and the stratum [C] of each cluster."""

    of_example: np.ndarray
    strata: np.ndarray

    @staticmethod
    def by_name(names: Sequence[Hashable], strata: Sequence[Hashable] | None = None) -> "Clusters":
        """Return a cluster for each name; None means one stratum for all."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        of_example = np.array([numbers[name] for name in names], dtype=np.int64)
        if strata is None:
            return Clusters(of_example, np.zeros(len(numbers), dtype=np.int64))
        stratum_of = dict(zip(names, strata, strict=True))
        order = {stratum: number for number, stratum in enumerate(dict.fromkeys(stratum_of.values()))}
        return Clusters(of_example, np.array([order[stratum_of[name]] for name in numbers], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.strata)

    def among(self, examples: np.ndarray) -> "Clusters":
        """Return the clusters of these examples, by their rows."""
        kept, of_example = np.unique(self.of_example[examples], return_inverse=True)
        return Clusters(of_example, np.unique(self.strata[kept], return_inverse=True)[1])

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Add up values [N, M] by cluster, [C, M]."""
        return np.stack([np.bincount(self.of_example, column, len(self)) for column in values.T], axis=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric's value on the examples, with the 2.5th and 97.5th percentile of its resampled values."""

    value: float
    low: float
    high: float


def sign_shown(low: float, high: float, num_clusters: int) -> int:
    """Return the sign of the difference that an interval shows, 0 if it shows none or has too few clusters."""
    if num_clusters < FEWEST_CLUSTERS:
        return 0
    return int(round(low, DIGITS) > 0) - int(round(high, DIGITS) < 0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons by Holm (1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def value_of(ratio: Ratio) -> float:
    """Return the metric over all examples."""
    return float(ratio.transform(np.sum(ratio.numerators) / np.sum(ratio.denominators)))


def wilson_interval(num_right: float, num_all: int) -> Interval:
    """Return the 95% interval of a share by the score test (Wilson 1927). Raises ValueError if `num_all` is 0.

    Unlike a bootstrap it has a width if all examples are right, or none.
    """
    if num_all < 1 or not 0 <= num_right <= num_all:
        raise ValueError(f"{num_right:g} of {num_all} is not a share")
    share, z2 = num_right / num_all, NORMAL_QUANTILE**2
    centre = (share + z2 / (2 * num_all)) / (1 + z2 / num_all)
    half = math.sqrt(share * (1 - share) * z2 / num_all + (z2 / (2 * num_all)) ** 2) / (1 + z2 / num_all)
    # At a share of 0 or 1, one end equals the share up to rounding.
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def interval_of(ratio: Ratio, num_resamples: int = 10_000, seed: int = 0, clusters: Clusters | None = None) -> Interval:
    """Return the metric with its interval; by default each example is a cluster."""
    return percentile_interval(value_of(ratio), _resampled([ratio], num_resamples, seed, clusters)[:, 0])


def interval_of_shares(
    ratio: Ratio, num_resamples: int = 10_000, seed: int = 0, clusters: Clusters | None = None
) -> Interval:
    """Return `interval_of`, or Wilson's interval if the metric is a share of examples.

    Wilson's assumes independent examples, so clusters and strata get a bootstrap, unless its interval has no width.
    """
    is_share = (
        ratio.transform is identity and np.all(ratio.denominators == 1) and np.isin(ratio.numerators, (0, 1)).all()
    )
    is_independent = clusters is None or (len(clusters) == len(clusters.of_example) and not clusters.strata.any())
    if not (is_share and is_independent):
        interval = interval_of(ratio, num_resamples, seed, clusters)
        if not is_share or interval.low < interval.high:
            return interval
    return wilson_interval(float(np.sum(ratio.numerators)), len(ratio.numerators))


def difference_and_p(
    a: Ratio, b: Ratio, num_resamples: int = 10_000, seed: int = 0, clusters: Clusters | None = None
) -> tuple[Interval, float]:
    """Return the metric of a minus that of b with its interval, and the two-sided p-value of no difference.

    The p-value is 1 with fewer than FEWEST_CLUSTERS.
    """
    both = _resampled([a, b], num_resamples, seed, clusters)
    value, resampled = value_of(a) - value_of(b), both[:, 0] - both[:, 1]
    num_clusters = len(a.numerators) if clusters is None else len(clusters)
    p = p_value(value, resampled) if num_clusters >= FEWEST_CLUSTERS else 1.0
    return percentile_interval(value, resampled), p


def percentile_interval(value: float, resampled: np.ndarray) -> Interval:
    """Return a value with the interval of its resampled values [num_resamples]; NaN marks an undefined one."""
    low, high = np.percentile(resampled[~np.isnan(resampled)], [2.5, 97.5])
    return Interval(value, float(low), float(high))


def p_value(value: float, resampled: np.ndarray) -> float:
    """Return twice the share of resamples beyond 0: below 0.05 exactly if the 95% interval excludes 0.

    If no resample is beyond 0, the number of resamples bounds p, and a normal approximation with their standard
    deviation replaces the bound if it is smaller.
    """
    resampled = np.sort(resampled[~np.isnan(resampled)])
    share = min(_share_up_to_0(resampled), _share_up_to_0(-resampled[::-1]))
    if share:
        return min(1.0, 2 * share)
    bound, spread = 2 / (len(resampled) + 1), float(resampled.std())
    return min(bound, math.erfc(abs(value) / spread / math.sqrt(2))) if spread else 0.0


def _share_up_to_0(ordered: np.ndarray) -> float:
    """Return the quantile of 0, interpolated like `np.percentile`; 0 if all values are above it."""
    place = int(np.searchsorted(ordered, 0, "right"))
    if place in (0, len(ordered)):
        return float(place > 0)
    below, above = ordered[place - 1], ordered[place]
    return float((place - 1 - below / (above - below)) / (len(ordered) - 1))


def _resampled(ratios: Sequence[Ratio], num_resamples: int, seed: int, clusters: Clusters | None = None) -> np.ndarray:
    """Return values [num_resamples, M] of M ratios, with the same clusters in a resample for all of them.

    NaN marks a resample with a denominator of 0.
    """
    sums = np.stack([part for ratio in ratios for part in (ratio.numerators, ratio.denominators)], axis=1)  # [N, 2M]
    if clusters is not None:
        sums = clusters.sums(sums)  # [C, 2M]
    strata = None if clusters is None else clusters.strata
    drawn = [counts @ sums for counts in resample_counts(len(sums), num_resamples, seed, strata)]
    totals = np.concatenate(drawn)  # [num_resamples, 2M]
    totals[:, 1::2][totals[:, 1::2] == 0] = np.nan  # a text without words still has bits
    values = [ratio.transform(totals[:, 2 * m] / totals[:, 2 * m + 1]) for m, ratio in enumerate(ratios)]
    return np.stack(values, axis=1)


def resample_counts(
    num_examples: int, num_resamples: int, seed: int, strata: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield the counts of each example in resamples, float64 [resamples, N], in chunks of resamples.

    With `strata` [N], every resample keeps the size of each stratum.
    """
    rng = np.random.default_rng(seed)
    of_stratum = [] if strata is None else [np.flatnonzero(strata == stratum) for stratum in np.unique(strata)]
    at_once = max(1, CHUNK_COUNTS // num_examples)
    for start in range(0, num_resamples, at_once):
        size = min(at_once, num_resamples - start)
        if len(of_stratum) > 1:
            drawn = np.concatenate([some[rng.integers(len(some), size=(size, len(some)))] for some in of_stratum], 1)
        else:
            drawn = rng.integers(num_examples, size=(size, num_examples))
        drawn += num_examples * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * num_examples)
        yield counts.reshape(size, num_examples).astype(np.float64)
