"""Exact search over float16 vectors: a matrix product and a top-k, chunk by chunk.

On a CPU the vectors stay memory-mapped files and a chunk becomes float32 in one small buffer, so the memory
taken is the vectors' own. On a GPU they are copied there block by block; all else is the same.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from replug.index_workers.vectors import BlockVectors, order_exactly, scan_exactly

# Rows of a chunk: on a CPU its float32 vectors stay in the processor's cache, nearly; a GPU wants few launches.
CHUNK_ROWS, CHUNK_ROWS_GPU = 4_096, 262_144
# Products of chunks in a row, 8 MiB, looked through together: a top-k of few columns is mostly its beginning.
STRETCH_PRODUCTS = 1 << 21
# Rows of a group. The k best rows lie in the k groups of the largest maxima, which are found many times faster.
GROUP = 16
# The product rounds by what else is in the batch; among a few more candidates than asked for, the exact order is found.
MARGIN = 8
ROUNDING = 1e-5  # of a product in float32, as a share of the two lengths; ten times what it is
QUERIES = 512  # searched at once, if not their candidates' numbers would be more than fit 256 MiB in float64
CANDIDATE_NUMBERS = 1 << 25


class ExactShard:
    """The vectors of one shard, never written again."""

    is_independent = True

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self._vectors, self._device = vectors, device
        self._max_length: float | None = None
        self._chunk_rows = CHUNK_ROWS if device.type == "cpu" else CHUNK_ROWS_GPU
        blocks = [torch.from_numpy(block) for block in vectors.blocks]
        self._blocks = blocks if device.type == "cpu" else [_copy_to(device, blocks, len(vectors), vectors.dim)]

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and inner products [B, min(k, size)], best first, for queries [B, D]."""
        at_once = max(1, min(QUERIES, CANDIDATE_NUMBERS // ((k + MARGIN) * self._vectors.dim)))
        parts = [self._search_some(some, k) for some in np.split(queries, range(at_once, len(queries), at_once))]
        rows, similarities = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def _search_some(self, queries: np.ndarray, k: int, margin: int = MARGIN) -> tuple[np.ndarray, np.ndarray]:
        products, places = self._candidates(torch.from_numpy(queries).to(self._device), min(k + margin, len(self)))
        rows = places.cpu().numpy() + self._vectors.first_row
        vectors = self._vectors.take(rows)
        found, similarities = order_exactly(queries, rows, vectors, k)
        if rows.shape[1] < len(self):
            least = products.amin(1).cpu().numpy()  # nothing that was left out has a larger product
            unsure = similarities[:, -1] - least <= ROUNDING * np.linalg.norm(queries, axis=1) * self._longest(vectors)
            if unsure.any():  # many documents are equal, or as good as
                again = self._search_some if margin == MARGIN else self._scan
                found[unsure], similarities[unsure] = again(queries[unsure], k, 8 * margin)
        return found, similarities

    def _longest(self, candidates: np.ndarray) -> float:
        """Length of the longest vector; unit vectors, as for cosine, need not all be looked at."""
        lengths = _lengths(candidates)
        if not lengths.size:
            return 0.0
        if self._max_length is None and lengths.max() - lengths.min() < 0.01 * lengths.max():
            return float(lengths.max())
        if self._max_length is None:
            self._max_length = max(float(_lengths(block).max()) for block in self._vectors.blocks if len(block))
        return self._max_length

    def _scan(self, queries: np.ndarray, k: int, _: int) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, by every product in float64: slow, and right however many documents are equal."""
        found = [scan_exactly(query, self._vectors, k) for query in queries]
        rows, similarities = zip(*found, strict=True)
        return np.stack(rows), np.stack(similarities)

    @torch.inference_mode()
    def _candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The largest products [B, k] and their places in the shard, in any order."""
        best = torch.empty(len(queries), 0, device=self._device)
        places = torch.empty(len(queries), 0, dtype=torch.long, device=self._device)
        for start, products in self._products(queries):
            values, at = _top_k(products, k)
            best, places = torch.cat([best, values], dim=1), torch.cat([places, at + start], dim=1)
            keep = best.topk(min(k, best.shape[1]), sorted=False).indices
            best, places = best.gather(1, keep), places.gather(1, keep)
        return best, places

    def _products(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First place and products [rows, B] of each stretch of chunks; the buffer is used again for the next."""
        transposed = queries.T.contiguous()
        rows = min(max(self._chunk_rows, STRETCH_PRODUCTS // max(1, len(queries))), len(self))
        stretch = torch.empty(rows, len(queries), device=self._device)
        start = filled = 0
        for _, chunk in self._chunks():
            if filled + len(chunk) > rows:
                yield start, stretch[:filled]
                start, filled = start + filled, 0
            torch.mm(chunk, transposed, out=stretch[filled : filled + len(chunk)])
            filled += len(chunk)
        if filled:
            yield start, stretch[:filled]

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


def _top_k(products: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The largest products [B, <=k] of products [rows, B] and their rows, in any order."""
    groups = len(products) // GROUP
    if groups <= k:
        return products.T.topk(min(k, len(products)), sorted=False)
    in_groups = products[: groups * GROUP].view(GROUP, groups, -1)  # row r is in group r % groups
    chosen = in_groups.amax(0).T.contiguous().topk(k, sorted=False).indices  # [B, k]
    rows = (chosen[:, None] + groups * torch.arange(GROUP, device=chosen.device)[:, None]).flatten(1)
    rest = torch.arange(groups * GROUP, len(products), device=chosen.device).expand(len(rows), -1)
    rows = torch.cat([rows, rest], dim=1)
    top = products.T.gather(1, rows).topk(k, sorted=False)
    return top.values, rows.gather(1, top.indices)


def _lengths(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("...d,...d->...", vectors, vectors, dtype=np.float32))


def _copy_to(device: torch.device, blocks: Sequence[Tensor], rows: int, dim: int) -> Tensor:
    """One matrix [rows, D] filled block by block, so that the host never holds it whole."""
    matrix = torch.empty(rows, dim, dtype=torch.float16, device=device)
    start = 0
    for block in blocks:
        matrix[start : start + len(block)] = block
        start += len(block)
    return matrix
