"""The temperature at which an ensemble predicts development texts best. Pure arithmetic on arrays.

    bits(T) = - sum over texts and tokens t of log2 sum over d of softmax_d(similarity_d / T) p(y_t | d, x, y_<t)

A grid over log T, from nearly the first document alone to nearly even weights, finds the valley, and a golden section
searches between the neighbours of the best grid point (Kiefer 1953). The grid's unit is how far similarities of a text
are apart, which is 0.01 for a tuned encoder with cosines and 10 for one with inner products.

A temperature outlives its fit: `ask` and `serve` weigh by it. So it stays 1 where there are fewer than MIN_TEXTS texts,
and where the best of the grid is one of its ends, at which similarities say nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from replug.evals.intervals import bits_of
from replug.models.ensemble import MIN_TEXTS, can_fit, mix, prior_log_weights

GOLDEN = (math.sqrt(5) - 1) / 2
LOWEST, HIGHEST, STEP = -5.0, 10.0, 0.5  # of the grid: log2 of the temperature over the similarities' spread
TOLERANCE = 1e-4  # in log2 of the temperature
DIGITS = 4  # of a fitted temperature that are kept, so that a last bit of a score changes none


@dataclass(frozen=True, slots=True)
class DocumentScores:
    """Log-probs [K, T] (nats) of one text's tokens given each document, and the documents' similarities [K]."""

    token_logprobs: np.ndarray
    similarities: np.ndarray


@dataclass(frozen=True, slots=True)
class TemperatureFit:
    """The best temperature, and the bits of all texts at it. `stays` says why it is 1 without a fit, else nothing."""

    temperature: float
    bits: float
    stays: str = ""


def ensemble_bits(texts: Sequence[DocumentScores], temperature: float) -> float:
    """Return the bits of all texts together."""
    return sum(bits_of(mix(text.token_logprobs, prior_log_weights(text.similarities, temperature))) for text in texts)


def fit_temperature(texts: Sequence[DocumentScores]) -> TemperatureFit:
    """Fit a temperature, the same for the same texts in the same order. Raises ValueError without texts.

    The temperature is 1 where the documents of every text are equally similar: none changes anything then.
    """
    if not texts:
        raise ValueError("there are no texts to fit a temperature to")
    if not can_fit(len(texts)):
        return TemperatureFit(1.0, ensemble_bits(texts, 1.0), f"a fit needs {MIN_TEXTS} development texts or more")
    # The mean over texts of the standard deviation of a text's similarities.
    spread = float(np.mean([np.std(np.asarray(text.similarities, dtype=np.float64)) for text in texts]))
    if not spread:
        return TemperatureFit(1.0, ensemble_bits(texts, 1.0))

    def bits(log2: float) -> float:
        return ensemble_bits(texts, spread * 2.0**log2)

    grid = np.arange(LOWEST, HIGHEST + STEP / 2, STEP).tolist()
    values = [bits(point) for point in grid]
    best = int(np.argmin(values))
    if best in (0, len(grid) - 1):
        which = "the first document alone" if best == 0 else "even weights"
        return TemperatureFit(1.0, ensemble_bits(texts, 1.0), f"{which} would predict the development texts best")
    low, high = grid[best - 1], grid[best + 1]
    temperature = float(f"{spread * 2.0 ** golden_section(bits, low, high, TOLERANCE):.{DIGITS}g}")
    return TemperatureFit(temperature, ensemble_bits(texts, temperature))


def golden_section(function: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return where a function with one valley between `low` and `high` is lowest, to within the tolerance."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2
