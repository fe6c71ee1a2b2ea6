"""Products of float16 vectors with float32 queries in float16, as exact as in float32.

A query is the sum of two float16 vectors, hi + lo, to 22 bits. Two products of float16 with sums in float32 are what
a GPU's tensor cores do many times faster than one of float32, and the vectors are read as they are stored.
"""

import torch
from torch import Tensor

LOW = 2.0**11  # lo is so many times larger in float16, where it would be too small for all of its bits


class SplitQueries:
    """Queries [B, D] float32. Each is scaled by a power of two, so that any length fits float16."""

    def __init__(self, queries: Tensor) -> None:
        self._scale = torch.exp2(torch.frexp(queries.abs().amax(1)).exponent)  # [B]; 1 of a query of zeros
        scaled = queries / self._scale[:, None]
        high = scaled.half()
        low = ((scaled - high.float()) * LOW).half()
        self._halves = torch.cat([high, low]).T  # [D, 2B]

    def products(self, vectors: Tensor) -> Tensor:
        """Inner products [rows, B] float32 with vectors [rows, D] float16."""
        high, low = _summed_in_float32(vectors, self._halves).chunk(2, dim=1)
        return high.add_(low, alpha=1 / LOW).mul_(self._scale)


def _summed_in_float32(vectors: Tensor, halves: Tensor) -> Tensor:
    """A processor has no such product, and float32 holds those of float16 numbers."""
    if vectors.device.type == "cpu":
        return vectors.float() @ halves.float()
    return torch.mm(vectors, halves, out_dtype=torch.float32)
