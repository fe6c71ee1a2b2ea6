"""Exact search over float16 vectors: a matrix product and a top-k, chunk by chunk.

On a CPU the vectors stay memory-mapped files and a chunk becomes float32 in one small buffer, so the memory
taken is the vectors' own. On a GPU they are copied there block by block; all else is the same.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from index_workers.vectors import BlockVectors, order_exactly

# Rows of a chunk: on a CPU its float32 vectors stay in the processor's cache, nearly; a GPU wants few launches.
CHUNK_ROWS, CHUNK_ROWS_GPU = 16_384, 262_144
# The product rounds by what else is in the batch; among a few more candidates than asked for, the exact order is found.
MARGIN = 8
QUERIES = 512  # searched at once; their products with a chunk are held in memory


class ExactShard:
    """The vectors of one shard, never written again."""

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self._vectors, self._device = vectors, device
        self._chunk_rows = CHUNK_ROWS if device.type == "cpu" else CHUNK_ROWS_GPU
        blocks = [torch.from_numpy(block) for block in vectors.blocks]
        self._blocks = blocks if device.type == "cpu" else [_copy_to(device, blocks, len(vectors), vectors.dim)]

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and inner products [B, min(k, size)], best first, for queries [B, D]."""
        parts = [self._search_some(some, k) for some in np.split(queries, range(QUERIES, len(queries), QUERIES))]
        rows, similarities = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def _search_some(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        places = self._candidates(torch.from_numpy(queries).to(self._device), min(k + MARGIN, len(self)))
        rows = places.cpu().numpy() + self._vectors.first_row
        return order_exactly(queries, rows, self._vectors.take(rows), k)

    @torch.inference_mode()
    def _candidates(self, queries: Tensor, k: int) -> Tensor:
        """Places in the shard [B, k] of the largest products, in any order."""
        best = torch.empty(len(queries), 0, device=self._device)
        places = torch.empty(len(queries), 0, dtype=torch.long, device=self._device)
        for start, chunk in self._chunks():
            top = (queries @ chunk.T).topk(min(k, len(chunk)), sorted=False)
            best = torch.cat([best, top.values], dim=1)
            places = torch.cat([places, top.indices + start], dim=1)
            keep = best.topk(min(k, best.shape[1]), sorted=False).indices
            best, places = best.gather(1, keep), places.gather(1, keep)
        return places

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        """First place and float32 vectors [rows, D] of each chunk; the buffer is used again for the next."""
        buffer = torch.empty(min(self._chunk_rows, len(self)), self._vectors.dim, device=self._device)
        start = filled = 0
        for piece in (piece for block in self._blocks for piece in block.split(self._chunk_rows)):
            if filled + len(piece) > len(buffer):
                yield start, buffer[:filled]
                start, filled = start + filled, 0
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled:
            yield start, buffer[:filled]


def _copy_to(device: torch.device, blocks: Sequence[Tensor], rows: int, dim: int) -> Tensor:
    """One matrix [rows, D] filled block by block, so that the host never holds it whole."""
    matrix = torch.empty(rows, dim, dtype=torch.float16, device=device)
    start = 0
    for block in blocks:
        matrix[start : start + len(block)] = block
        start += len(block)
    return matrix
