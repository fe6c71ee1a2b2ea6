"""Exact search over float16 vectors: a matrix product and a top-k, chunk by chunk.

On a CPU the vectors stay memory-mapped files and a chunk becomes float32 in one small buffer, so search takes
little memory beside the vectors. A GPU receives them once, block by block, and multiplies them in float16
(`SplitQueries`); all else is the same. The CPU sums the similarities of a result, by `order_exactly`, for
candidates of either device.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from replug.index_workers.answers import merge_top_k
from replug.index_workers.vectors import BlockVectors, SplitQueries, order_exactly

# Rows of a chunk: on a CPU its float32 vectors nearly fit the cache; a GPU wants few launches.
CHUNK_ROWS, CHUNK_ROWS_GPU = 4_096, 262_144
PRODUCTS_GPU = 1 << 24  # of a chunk on a GPU, where each takes 16 bytes at most with its part of the k best
# Products of consecutive chunks, 8 MiB, for one top-k: its fixed cost dominates for few columns.
STRETCH_PRODUCTS = 1 << 21
# Rows of a group. The k best rows lie in the k groups with the largest maxima; finding these is many times faster.
GROUP = 16
# The rounding of a product depends on the batch, so a few more candidates than requested are ordered exactly.
MARGIN = 8
# Ten times the rounding error of a float32 product, as a share of the lengths' product. Tensor cores truncate.
ROUNDING, ROUNDING_SPLIT = 1e-5, 4e-5
QUERIES = 512  # searched at once, unless their candidates exceed 256 MiB in float64
CANDIDATE_NUMBERS = 1 << 25


class MappedVectors:
    """Vectors [rows, D] float16 in files that stay mapped; the CPU multiplies them in float32."""

    device, is_split = torch.device("cpu"), False

    def __init__(self, vectors: BlockVectors) -> None:
        self._vectors = vectors
        self.blocks = [torch.from_numpy(block) for block in vectors.blocks]

    def take(self, places: Tensor) -> Tensor:
        return torch.from_numpy(self._vectors.take(places.numpy() + self._vectors.first_row))


class CopiedVectors:
    """Vectors [rows, D] float16 as one matrix on a device, multiplied in float16 by split queries."""

    is_split = True

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self.device = device
        self._matrix = torch.empty(len(vectors), vectors.dim, dtype=torch.float16, device=device)
        self.blocks = [self._matrix]
        start = 0
        for block in vectors.blocks:  # so that the host never holds the whole matrix
            self._matrix[start : start + len(block)] = torch.from_numpy(block)
            start += len(block)

    def take(self, places: Tensor) -> Tensor:
        return self._matrix.index_select(0, places.flatten()).view(*places.shape, -1)


class ExactShard:
    """Exact search over the immutable vectors of one shard."""

    is_independent = True

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self._first_row, self._rows, self._dim = vectors.first_row, len(vectors), vectors.dim
        on_cpu = device.type == "cpu"
        self._vectors = MappedVectors(vectors) if on_cpu else CopiedVectors(vectors, device)
        self._device = self._vectors.device
        self._max_length: float | None = None
        self._chunk_rows = CHUNK_ROWS if on_cpu else CHUNK_ROWS_GPU
        self._rounding = ROUNDING_SPLIT if self._vectors.is_split else ROUNDING

    def __len__(self) -> int:
        return self._rows

    def search(self, queries: np.ndarray, k: int, margin: int = MARGIN) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and inner products [B, min(k, size)], best first, for queries [B, D].

        At first `margin` candidates beyond k are ordered exactly. Queries with further documents that may equal the
        k-th repeat with eight times the margin.
        """
        at_once = max(1, min(QUERIES, CANDIDATE_NUMBERS // ((k + margin) * self._dim)))
        parts = [
            self._search_some(some, k, margin) for some in np.split(queries, range(at_once, len(queries), at_once))
        ]
        rows, similarities = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def _search_some(self, queries: np.ndarray, k: int, margin: int) -> tuple[np.ndarray, np.ndarray]:
        products, places = self._candidates(torch.from_numpy(queries).to(self._device), min(k + margin, len(self)))
        parts = []
        for some in places.split(max(1, CANDIDATE_NUMBERS // (len(queries) * self._dim)), dim=1):
            rows, vectors = some.cpu().numpy() + self._first_row, self._vectors.take(some).cpu().numpy()
            parts.append(order_exactly(queries, rows, vectors, k))
        nearest, similarities = parts[0] if len(parts) == 1 else merge_top_k(parts, k)
        if places.shape[1] < len(self):
            least = products.amin(1).cpu().numpy()  # no other document has a larger product
            lengths = _lengths(queries) * self._longest(vectors)
            unsure = similarities[:, -1] - least <= self._rounding * lengths
            if unsure.any():
                nearest[unsure], similarities[unsure] = self.search(queries[unsure], k, 8 * margin)
        return nearest, similarities

    def _longest(self, candidates: np.ndarray) -> float:
        """Return the largest length of a vector; if the candidates' lengths agree, as for cosine, read no others."""
        lengths = _lengths(candidates)
        if not lengths.size:
            return 0.0
        if self._max_length is None and lengths.max() - lengths.min() < 0.01 * lengths.max():
            return float(lengths.max())
        if self._max_length is None:
            self._max_length = max(float(chunk.norm(dim=1).max()) for chunk in self._chunks())
        return self._max_length

    @torch.inference_mode()
    def _candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the largest products [B, k] and their places in the shard, in any order."""
        best = torch.empty(len(queries), 0, device=self._device)
        places = torch.empty(len(queries), 0, dtype=torch.long, device=self._device)
        for start, products in self._products(queries):
            values, at = _top_k(products, k)
            best, places = torch.cat([best, values], dim=1), torch.cat([places, at + start], dim=1)
            keep = best.topk(min(k, best.shape[1]), sorted=False).indices
            best, places = best.gather(1, keep), places.gather(1, keep)
        return best, places

    def _products(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield first place and products [rows, B] of each stretch of chunks; the buffer is used again for the next."""
        if not self._vectors.is_split:
            yield from self._float32_products(queries)
            return
        split, start = SplitQueries(queries), 0
        for piece in self._pieces(PRODUCTS_GPU // max(1, len(queries))):
            yield start, split.products(piece)
            start += len(piece)

    def _float32_products(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        transposed = queries.T.contiguous()
        rows = min(max(self._chunk_rows, STRETCH_PRODUCTS // max(1, len(queries))), len(self))
        stretch = torch.empty(rows, len(queries), device=self._device)
        start = filled = 0
        for chunk in self._chunks():
            if filled + len(chunk) > rows:
                yield start, stretch[:filled]
                start, filled = start + filled, 0
            torch.mm(chunk, transposed, out=stretch[filled : filled + len(chunk)])
            filled += len(chunk)
        if filled:
            yield start, stretch[:filled]

    def _chunks(self) -> Iterator[Tensor]:
        """Yield the float32 vectors [rows, D] of each chunk; the buffer is used again for the next."""
        buffer = torch.empty(min(self._chunk_rows, len(self)), self._dim, device=self._device)
        filled = 0
        for piece in self._pieces():
            if filled + len(piece) > len(buffer):
                yield buffer[:filled]
                filled = 0
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled:
            yield buffer[:filled]

    def _pieces(self, most: int = CHUNK_ROWS_GPU) -> Iterator[Tensor]:
        """Yield the float16 vectors, at most a chunk's rows at a time."""
        rows = min(most, self._chunk_rows)
        return (piece for block in self._vectors.blocks for piece in block.split(rows))


def _top_k(products: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest products [B, <=k] of products [rows, B] and their rows, in any order."""
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
