"""The numbers themselves. Pure."""

import math
from collections.abc import Sequence

import numpy as np


def bits_of(token_logprobs: np.ndarray) -> float:
    """Bits of a text whose tokens have these log-probs in nats: the sum of -log2 p."""
    return float(-np.asarray(token_logprobs, dtype=np.float64).sum() / math.log(2))


def bits_per_byte(bits: np.ndarray, num_bytes: np.ndarray) -> float:
    """Bits over UTF-8 bytes, both summed over texts first, so that long texts weigh more."""
    return float(np.sum(bits) / np.sum(num_bytes))


def paired_bootstrap_interval(
    bits_a: np.ndarray, bits_b: np.ndarray, num_bytes: np.ndarray, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """95% interval of bits per byte of a minus that of b; texts are drawn anew, the same for both."""
    rng = np.random.default_rng(seed)
    difference, num_texts = bits_a - bits_b, len(num_bytes)
    resampled = np.empty(num_resamples)
    for i in range(num_resamples):
        rows = rng.integers(num_texts, size=num_texts)
        resampled[i] = difference[rows].sum() / num_bytes[rows].sum()
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def recall_at_k(found: np.ndarray, gold: Sequence[set[int]], k: int) -> float:
    """Share of queries with a gold row among the first k of their rows [W, >=k] (any counts, as in DPR)."""
    hits = [bool(rows.intersection(int(row) for row in found[i, :k])) for i, rows in enumerate(gold)]
    return float(np.mean(hits))
