"""Metrics as ratios of sums over examples, and their 95% intervals by a paired bootstrap over examples. Pure.

value = transform(sum of numerators / sum of denominators), so that long texts weigh more where they should:

    bits per byte     Ratio(bits, num_bytes)
    perplexity        Ratio(bits, num_tokens, np.exp2)
    accuracy, F1      Ratio(values, np.ones(N))

An interval of a difference draws the same examples for both methods, which must have been measured on the same ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]
NORMAL_QUANTILE = 1.959963984540054  # 97.5% of a standard normal distribution lie below
CHUNK_COUNTS = 1 << 18  # numbers of a matrix of counts: 2 MiB each, so that they stay in the cache


def identity(values: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True)
class Ratio:
    """Numerators [N] and denominators [N], 0 or more and not all 0, of N examples; ValueError for other arrays."""

    numerators: np.ndarray
    denominators: np.ndarray
    transform: Transform = identity

    def __post_init__(self) -> None:
        shapes = np.shape(self.numerators), np.shape(self.denominators)
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not shapes[0][0]:
            raise ValueError(f"expected a numerator and a denominator for each example, found shapes {shapes}")
        if not (np.isfinite(self.numerators).all() and np.isfinite(self.denominators).all()):
            raise ValueError("numerators and denominators must be finite")
        if np.min(self.denominators) < 0 or not np.any(self.denominators):
            raise ValueError("denominators must be 0 or more, and some above 0")


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric's value on the examples, with the 2.5th and 97.5th percentile of its resampled values."""

    value: float
    low: float
    high: float


def verdict(low: float, high: float) -> str:
    """What the interval of a difference allows one to say."""
    return "lower" if high < 0 else "higher" if low > 0 else "no difference shown"


def value_of(ratio: Ratio) -> float:
    """The metric over all examples."""
    return float(ratio.transform(np.sum(ratio.numerators) / np.sum(ratio.denominators)))


def wilson_interval(num_right: float, num_all: int) -> Interval:
    """The 95% interval of a share by its score test (Wilson 1927); ValueError where nothing was counted.

    Unlike a bootstrap it has a width where all of few examples are right, or none.
    """
    if num_all < 1 or not 0 <= num_right <= num_all:
        raise ValueError(f"{num_right:g} of {num_all} is no share")
    share, z2 = num_right / num_all, NORMAL_QUANTILE**2
    centre = (share + z2 / (2 * num_all)) / (1 + z2 / num_all)
    half = math.sqrt(share * (1 - share) * z2 / num_all + (z2 / (2 * num_all)) ** 2) / (1 + z2 / num_all)
    # At 0 and 1 an end is the share itself, but for rounding.
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def interval_of(ratio: Ratio, num_resamples: int = 10_000, seed: int = 0) -> Interval:
    """The metric with its interval."""
    return percentile_interval(value_of(ratio), _resampled([ratio], num_resamples, seed)[:, 0])


def interval_of_shares(ratio: Ratio, num_resamples: int = 10_000, seed: int = 0) -> Interval:
    """As `interval_of`; Wilson's where every example counts 0 or 1 of 1, which a resample of equal ones cannot show."""
    if not is_share(ratio):
        return interval_of(ratio, num_resamples, seed)
    return wilson_interval(float(np.sum(ratio.numerators)), len(ratio.numerators))


def is_share(ratio: Ratio) -> bool:
    """Whether the metric is how many of all examples have something."""
    return (
        ratio.transform is identity
        and bool(np.all(ratio.denominators == 1))
        and bool(np.isin(ratio.numerators, (0, 1)).all())
    )


def difference_interval(a: Ratio, b: Ratio, num_resamples: int = 10_000, seed: int = 0) -> Interval:
    """The metric of a minus that of b with its interval; ValueError where the two have not as many examples."""
    if len(a.numerators) != len(b.numerators):
        raise ValueError(f"{len(a.numerators)} examples against {len(b.numerators)}: they must be the same ones")
    resampled = _resampled([a, b], num_resamples, seed)
    return percentile_interval(value_of(a) - value_of(b), resampled[:, 0] - resampled[:, 1])


def percentile_interval(value: float, resampled: np.ndarray) -> Interval:
    """A value with the interval that its resampled values [num_resamples] give."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _resampled(ratios: Sequence[Ratio], num_resamples: int, seed: int) -> np.ndarray:
    """Values [num_resamples, M] of M ratios; the examples of a resample are the same for all of them."""
    sums = np.stack([part for ratio in ratios for part in (ratio.numerators, ratio.denominators)], axis=1)  # [N, 2M]
    drawn = [counts @ sums for counts in resample_counts(len(sums), num_resamples, seed)]
    totals = np.concatenate(drawn)  # [num_resamples, 2M]
    values = [ratio.transform(totals[:, 2 * place] / totals[:, 2 * place + 1]) for place, ratio in enumerate(ratios)]
    return np.stack(values, axis=1)


def resample_counts(num_examples: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each example is drawn, [resamples, N] in float64, some resamples at a time."""
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK_COUNTS // num_examples)
    for start in range(0, num_resamples, at_once):
        size = min(at_once, num_resamples - start)
        drawn = rng.integers(num_examples, size=(size, num_examples))
        drawn += num_examples * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * num_examples)
        yield counts.reshape(size, num_examples).astype(np.float64)
