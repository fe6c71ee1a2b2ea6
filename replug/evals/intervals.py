"""Metrics as ratios of sums over examples, and their 95% intervals by a paired bootstrap over clusters. Pure.

value = transform(sum of numerators / sum of denominators), so that long texts weigh more where they should. An interval
of a difference draws the same examples for both methods.

Examples of one text are alike, so texts are drawn and not examples (`tests/evals/test_intervals.py`). Subjects, as
MMLU's, are strata: each keeps its number of clusters in every draw. With fewer than FEW_CLUSTERS the percentiles of a
bootstrap are too narrow (Cameron, Gelbach and Miller 2008), and with fewer than FEWEST_CLUSTERS nothing is shown.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]
NORMAL_QUANTILE = 1.959963984540054  # 97.5% of a standard normal distribution lie below
CHUNK_COUNTS = 1 << 18  # numbers of a matrix of counts: 2 MiB each, so that they stay in the cache
FEW_CLUSTERS = 20
FEWEST_CLUSTERS = 6  # the differences of fewer have one sign by chance more than 1 time in 20: 2 / 2^5
DIGITS = 5  # a difference that is printed as 0.00000 is one of rounding
LEVEL = 0.05
NO_DIFFERENCE = "no difference shown"


def bits_of(token_logprobs: np.ndarray) -> float:
    """Return the bits of a text whose tokens have these log-probs in nats: the sum of -log2 p."""
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
    """Examples that are drawn together: the cluster [N] of each, from 0, and the stratum [C] of each cluster."""

    of_example: np.ndarray
    strata: np.ndarray

    @staticmethod
    def by_name(names: Sequence[Hashable], strata: Sequence[Hashable] | None = None) -> "Clusters":
        """Put examples of one name into a cluster; one stratum holds all where none are given."""
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
    """Return the sign of the difference that an interval over so many clusters shows, 0 where it shows none."""
    if num_clusters < FEWEST_CLUSTERS:
        return 0
    return int(round(low, DIGITS) > 0) - int(round(high, DIGITS) < 0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in the order given (Holm 1979): all together err 1 time in 20."""
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
    """Return the 95% interval of a share by its score test (Wilson 1927). Raises ValueError where n is 0.

    Unlike a bootstrap it has a width where all of few examples are right, or none.
    """
    if num_all < 1 or not 0 <= num_right <= num_all:
        raise ValueError(f"{num_right:g} of {num_all} is no share")
    share, z2 = num_right / num_all, NORMAL_QUANTILE**2
    centre = (share + z2 / (2 * num_all)) / (1 + z2 / num_all)
    half = math.sqrt(share * (1 - share) * z2 / num_all + (z2 / (2 * num_all)) ** 2) / (1 + z2 / num_all)
    # At 0 and 1 an end is the share itself, but for rounding.
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def interval_of(ratio: Ratio, num_resamples: int = 10_000, seed: int = 0, clusters: Clusters | None = None) -> Interval:
    """Return the metric with its interval; each example is a cluster where none are given."""
    return percentile_interval(value_of(ratio), _resampled([ratio], num_resamples, seed, clusters)[:, 0])


def interval_of_shares(
    ratio: Ratio, num_resamples: int = 10_000, seed: int = 0, clusters: Clusters | None = None
) -> Interval:
    """Return `interval_of`, or Wilson's interval where every example counts 0 or 1 of 1.

    Wilson's takes examples for independent, so clusters and strata have a bootstrap's, unless that has no width.
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

    The p-value is 1 where there are fewer than FEWEST_CLUSTERS.
    """
    both = _resampled([a, b], num_resamples, seed, clusters)
    value, resampled = value_of(a) - value_of(b), both[:, 0] - both[:, 1]
    num_clusters = len(a.numerators) if clusters is None else len(clusters)
    p = p_value(value, resampled) if num_clusters >= FEWEST_CLUSTERS else 1.0
    return percentile_interval(value, resampled), p


def percentile_interval(value: float, resampled: np.ndarray) -> Interval:
    """Return a value with the interval of its resampled values [num_resamples]; NaN is a resample without one."""
    low, high = np.percentile(resampled[~np.isnan(resampled)], [2.5, 97.5])
    return Interval(value, float(low), float(high))


def p_value(value: float, resampled: np.ndarray) -> float:
    """Return twice the share of resamples beyond 0: below 0.05 exactly where the 95% interval is without 0.

    Where none is on the other side their number is all that bounds it, and the normal distribution of their spread is
    taken, where it says less.
    """
    resampled = np.sort(resampled[~np.isnan(resampled)])
    share = min(_share_up_to_0(resampled), _share_up_to_0(-resampled[::-1]))
    if share:
        return min(1.0, 2 * share)
    bound, spread = 2 / (len(resampled) + 1), float(resampled.std())
    return min(bound, math.erfc(abs(value) / spread / math.sqrt(2))) if spread else 0.0


def _share_up_to_0(ordered: np.ndarray) -> float:
    """Return the quantile that 0 is, as `np.percentile` interpolates; 0 where all values are above it."""
    place = int(np.searchsorted(ordered, 0, "right"))
    if place in (0, len(ordered)):
        return float(place > 0)
    below, above = ordered[place - 1], ordered[place]
    return float((place - 1 - below / (above - below)) / (len(ordered) - 1))


def _resampled(ratios: Sequence[Ratio], num_resamples: int, seed: int, clusters: Clusters | None = None) -> np.ndarray:
    """Return values [num_resamples, M] of M ratios; the clusters of a resample are the same for all of them.

    NaN where a resample has nothing to divide by.
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
    """Yield how often each example is drawn, [resamples, N] in float64, some resamples at a time.

    With the stratum [N] of each, every resample has as many of a stratum as there are.
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
