"""Log-probs that a device may still be computing, so that its next passes are launched before they are fetched."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from replug.models.black_box_lm import ContinuationScore
from replug.models.hardware import HostCopy


class PassScores:
    """Of one pass: float32 log-probs [N], of rows with so many tokens each. Their copy to the host is under way."""

    def __init__(self, logprobs: Tensor, sizes: list[int]) -> None:
        self.copy, self.sizes = HostCopy(logprobs), sizes

    def rows(self) -> list[np.ndarray]:
        """Waits for the device."""
        return [part.numpy() for part in self.copy.tensor().split(self.sizes)]


class PendingScores:
    """Of a call: passes, and which rows of the call they hold, one after the other."""

    def __init__(self, passes: Sequence[PassScores], rows: Sequence[int]) -> None:
        self._passes, self._rows = passes, rows

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return all(one.copy.is_there() for one in self._passes)

    def result(self) -> list[ContinuationScore]:
        """In the order of the call. Any thread may wait for it. Raises what went wrong on the device."""
        logprobs = [row for one in self._passes for row in one.rows()]
        by_row = dict(zip(self._rows, logprobs, strict=True))
        return [ContinuationScore(by_row[row]) for row in range(len(by_row))]
