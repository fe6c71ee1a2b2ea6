"""Is a temperature fit for the scores it divides? Pure arithmetic on arrays [B, K].

A temperature far too high makes every document equally good, and one far too low keeps a single one:
either way the retriever learns nothing of the rest. Half the maximal entropy is a sound middle.
"""

import numpy as np

from replug.models.ensemble import log_softmax

NEARLY_UNIFORM, NEARLY_ONE_HOT = 0.995, 0.05


def entropy_share(scores: np.ndarray, temperature: float) -> float:
    """Mean entropy of softmax(scores / temperature) as a share of the maximum, log K, for K of at least 2."""
    log_p = log_softmax(np.asarray(scores, dtype=np.float64) / temperature)
    entropies = -(np.exp(log_p) * np.where(np.isfinite(log_p), log_p, 0.0)).sum(axis=-1)
    return float(entropies.mean() / np.log(log_p.shape[-1]))


def temperature_for_entropy_share(scores: np.ndarray, share: float = 0.5) -> float | None:
    """The temperature that gives this share of the maximal entropy; None where ties keep the entropy above it."""
    low, high = -20.0, 20.0  # natural logarithms of the temperature; entropy rises with it
    if entropy_share(scores, np.exp(low)) > share:
        return None
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_share(scores, np.exp(middle)) < share else (low, middle)
    return float(np.exp((low + high) / 2))


def temperature_warning(name: str, key: str, scores: np.ndarray, temperature: float) -> str | None:
    """What to tell the user about `key`, or None where the distribution is neither flat nor one-hot."""
    share = entropy_share(scores, temperature)
    if NEARLY_ONE_HOT < share < NEARLY_UNIFORM:
        return None
    shape = "nearly uniform" if share >= NEARLY_UNIFORM else "nearly one-hot"
    better = temperature_for_entropy_share(scores)
    advice = "its scores are equal or nearly so" if better is None else f"{key}={better:.2g} would give half of it"
    return f"{name} is {shape} at {key}={temperature:g}: {share:.1%} of the maximal entropy; {advice}"
