"""The stored vectors of one shard: float16 blocks by row, and exact similarities to a few of them.

On a GPU a float32 query is the sum of two float16 vectors, hi + lo, to 22 bits. Two products of float16 with sums in
float32 are what tensor cores do many times faster than one of float32, and the vectors are read as they are stored.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class BlockVectors:
    """Blocks [rows, D] float16 of rows `first_row`, `first_row + 1`, ...; all but the last of one length."""

    def __init__(self, first_row: int, blocks: Sequence[np.ndarray], dim: int) -> None:
        self.first_row, self.blocks, self.dim = first_row, list(blocks), dim
        self._block_rows = len(self.blocks[0]) if self.blocks else 1
        self._num_rows = sum(len(block) for block in self.blocks)

    def __len__(self) -> int:
        return self._num_rows

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return vectors [..., D] float16 of rows of the corpus."""
        places = rows.ravel() - self.first_row
        numbers, inside = np.divmod(places, self._block_rows)
        vectors = np.empty((len(places), self.dim), dtype=np.float16)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self.blocks) + 1))
        for number in np.flatnonzero(np.diff(bounds)):
            here = order[bounds[number] : bounds[number + 1]]
            vectors[here] = self.blocks[number][inside[here]]
        return vectors.reshape(*rows.shape, self.dim)


def order_exactly(queries: np.ndarray, rows: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and inner products [B, k] of candidate rows [B, C] with vectors [B, C, D], for queries [B, D].

    Summed in float64, so that a document's similarity is the same number whatever was searched beside it, by
    whichever hardware and index kind; equal ones come in the order of their rows.
    """
    products = np.einsum("bd,bcd->bc", queries.astype(np.float64), vectors.astype(np.float64))
    similarities = products.astype(np.float32)
    order = np.lexsort((rows, -similarities), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(similarities, order, axis=1)


def most_similar(
    queries: np.ndarray, rows: np.ndarray, vectors: np.ndarray, keep: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates [B, C] and their vectors that have the largest products in float32: [B, <=keep]."""
    if rows.shape[1] <= keep:
        return rows, vectors
    products = torch.bmm(torch.from_numpy(vectors).float(), torch.from_numpy(queries)[:, :, None])[:, :, 0]
    kept = products.topk(keep, dim=1, sorted=False).indices.numpy()
    return np.take_along_axis(rows, kept, axis=1), vectors[np.arange(len(rows))[:, None], kept]


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
        """Return inner products [rows, B] float32 with vectors [rows, D] float16."""
        if vectors.device.type == "cpu":  # which has no such product, and float32 holds those of float16 numbers
            products = vectors.float() @ self._halves.float()
        else:
            products = torch.mm(vectors, self._halves, out_dtype=torch.float32)
        high, low = products.chunk(2, dim=1)
        return high.add_(low, alpha=1 / LOW).mul_(self._scale)
