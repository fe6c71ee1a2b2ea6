"""The numbers themselves. Pure."""

import math

import numpy as np


def bits_of(token_logprobs: np.ndarray) -> float:
    """Bits of a text whose tokens have these log-probs in nats: the sum of -log2 p."""
    return float(-np.asarray(token_logprobs, dtype=np.float64).sum() / math.log(2))
