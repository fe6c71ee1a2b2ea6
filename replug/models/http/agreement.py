"""When log-probs that a server gave twice count as the same."""

import numpy as np

# Bfloat16 logits between 16 and 32 lie 0.125 apart, so single tokens of an honest server move by that and more when
# other texts stand beside them; their mean over a text moves little. A wrong position costs nats.
MEAN_TOLERANCE_NATS = 0.15
TOLERANCE_NATS = 1.0


def agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether log-probs (nats) [T] are those of one model, but for what stands beside a text in a request."""
    if one.shape != other.shape:
        return False
    difference = np.abs(one - other)
    return bool(difference.mean() <= MEAN_TOLERANCE_NATS and difference.max() <= TOLERANCE_NATS)
