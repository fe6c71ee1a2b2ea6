"""Exact search over float16 vectors: a matrix product and a top-k, chunk by chunk.

On a CPU the vectors stay memory-mapped files and a chunk becomes float32 in one small buffer, so the memory
taken is the vectors' own. On a GPU they are copied there block by block, no file is read again, and they are
multiplied as they are (`SplitQueries`); all else is the same. The numbers of an answer are summed on the
processor, by `order_exactly`, whichever device named the candidates.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from replug.index_workers.answers import merge_top_k
from replug.index_workers.vectors import BlockVectors, SplitQueries, order_exactly

# Rows of a chunk: on a CPU its float32 vectors stay in the processor's cache, nearly; a GPU wants few launches.
CHUNK_ROWS, CHUNK_ROWS_GPU = 4_096, 262_144
PRODUCTS_GPU = 1 << 24  # of a chunk on a GPU, where each takes 16 bytes at most with its part of the k best
# Products of chunks in a row, 8 MiB, looked through together: a top-k of few columns is mostly its beginning.
STRETCH_PRODUCTS = 1 << 21
# Rows of a group. The k best rows lie in the k groups of the largest maxima, which are found many times faster.
GROUP = 16
# The product rounds by what else is in the batch; among a few more candidates than asked for, the exact order is found.
MARGIN = 8
# Of a product in float32, as a share of the two lengths: ten times what it is. Tensor cores cut off what others round.
ROUNDING, ROUNDING_SPLIT = 1e-5, 4e-5
QUERIES = 512  # searched at once, if not their candidates' numbers would be more than fit 256 MiB in float64
CANDIDATE_NUMBERS = 1 << 25
# Where more documents are as good as the k-th than any margin: rows whose products are computed in float64 at once,
# and of those the most whose exact order is found at once.
NEAR_ROWS, ORDERED_ROWS = 16_384, 1_024


class MappedVectors:
    """Vectors [rows, D] float16 in files that stay mapped; the CPU multiplies them in float32."""

    device, is_split = torch.device("cpu"), False

    def __init__(self, vectors: BlockVectors) -> None:
        self._vectors = vectors
        self.blocks = [torch.from_numpy(block) for block in vectors.blocks]

    def take(self, places: Tensor) -> Tensor:
        return torch.from_numpy(self._vectors.take(places.numpy() + self._vectors.first_row))


class CopiedVectors:
    """Vectors [rows, D] float16 as one matrix on a device, multiplied as they are by queries in two parts."""

    is_split = True

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self.device = device
        self._matrix = torch.empty(len(vectors), vectors.dim, dtype=torch.float16, device=device)
        self.blocks = [self._matrix]
        start = 0
        for block in vectors.blocks:  # so that the host never holds it whole
            self._matrix[start : start + len(block)] = torch.from_numpy(block)
            start += len(block)

    def take(self, places: Tensor) -> Tensor:
        return self._matrix.index_select(0, places.flatten()).view(*places.shape, -1)


class ExactShard:
    """The vectors of one shard, never written again."""

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

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and inner products [B, min(k, size)], best first, for queries [B, D]."""
        at_once = max(1, min(QUERIES, CANDIDATE_NUMBERS // ((k + MARGIN) * self._dim)))
        parts = [self._search_some(some, k) for some in np.split(queries, range(at_once, len(queries), at_once))]
        rows, similarities = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def _search_some(self, queries: np.ndarray, k: int, margin: int = MARGIN) -> tuple[np.ndarray, np.ndarray]:
        products, places = self._candidates(torch.from_numpy(queries).to(self._device), min(k + margin, len(self)))
        rows, vectors = places.cpu().numpy() + self._first_row, self._vectors.take(places).cpu().numpy()
        nearest, similarities = order_exactly(queries, rows, vectors, k)
        if rows.shape[1] < len(self):
            least = products.amin(1).cpu().numpy()  # nothing that was left out has a larger product
            lengths = _lengths(queries) * self._longest(vectors)
            unsure = similarities[:, -1] - least <= self._rounding * lengths
            if unsure.any() and margin == MARGIN:
                nearest[unsure], similarities[unsure] = self._search_some(queries[unsure], k, 8 * margin)
            elif unsure.any():  # many documents are equal, or as good as
                nearest[unsure], similarities[unsure] = self._scan(
                    queries[unsure], k, similarities[unsure, -1], lengths[unsure]
                )
        return nearest, similarities

    def _longest(self, candidates: np.ndarray) -> float:
        """Length of the longest vector; unit vectors, as for cosine, need not all be looked at."""
        lengths = _lengths(candidates)
        if not lengths.size:
            return 0.0
        if self._max_length is None and lengths.max() - lengths.min() < 0.01 * lengths.max():
            return float(lengths.max())
        if self._max_length is None:
            self._max_length = max(float(chunk.norm(dim=1).max()) for _, chunk in self._chunks())
        return self._max_length

    @torch.inference_mode()
    def _scan(
        self, queries: np.ndarray, k: int, least: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search, however many documents are as good as the k-th, whose similarity is `least` [B] or more.

        Another pass over products in float32 finds the rows that could be among the k best. `lengths` [B] are those
        of the query and of the longest vector, multiplied.
        """
        on_device = torch.from_numpy(queries).to(self._device)
        floor = torch.from_numpy(least - self._rounding * lengths).to(self._device)
        best = _Best(queries, k, least, 4 * self._dim * 2.0**-53 * lengths)
        for start, products in self._products(on_device):
            near = (products >= floor).any(1).nonzero()[:, 0] + start
            for places in near.split(NEAR_ROWS):
                rows, vectors = places.cpu().numpy() + self._first_row, self._vectors.take(places)
                best.look_through(rows, vectors, vectors.double() @ on_device.double().T)
        return best.results()

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
        buffer = torch.empty(min(self._chunk_rows, len(self)), self._dim, device=self._device)
        start = filled = 0
        for piece in self._pieces():
            if filled + len(piece) > len(buffer):
                yield start, buffer[:filled]
                start, filled = start + filled, 0
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled:
            yield start, buffer[:filled]

    def _pieces(self, most: int = CHUNK_ROWS_GPU) -> Iterator[Tensor]:
        """Yield the float16 vectors, at most a chunk's rows at a time."""
        rows = min(most, self._chunk_rows)
        return (piece for block in self._vectors.blocks for piece in block.split(rows))


class _Best:
    """The k best rows of each query, of vectors that are looked through in ascending order of rows.

    `least` [B] is what the k-th has at the least, `slack` [B] how far two sums in float64 may lie apart. Equal
    documents have products that lie within it, so that they get one similarity, and the lowest rows win: of a million
    such rows the first k are ordered exactly, and no other.
    """

    def __init__(self, queries: np.ndarray, k: int, least: np.ndarray, slack: np.ndarray) -> None:
        self._queries, self._k, self._slack = queries, k, torch.from_numpy(slack)
        self._bar = torch.from_numpy(np.nextafter(least, np.float32(-np.inf)))  # a similarity must be above it
        nothing = np.empty((1, 0), dtype=np.int64), np.empty((1, 0), dtype=np.float32)
        self._results = [nothing] * len(queries)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        rows, similarities = zip(*self._results, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def look_through(self, rows: np.ndarray, vectors: Tensor, products: Tensor) -> None:
        """Look through the next rows [N], their vectors [N, D], and their products [N, B] in float64."""
        upper = (products + self._slack.to(products.device)).float()
        while len(queries := (above := upper > self._bar.to(upper.device)).any(0).nonzero()[:, 0].tolist()):
            for query in queries:
                chosen = above[:, query].nonzero()[:ORDERED_ROWS, 0]
                self._order(query, rows[chosen.cpu().numpy()], vectors[chosen].cpu().numpy())
                upper[: int(chosen[-1]) + 1, query] = -torch.inf

    def _order(self, query: int, rows: np.ndarray, vectors: np.ndarray) -> None:
        new = order_exactly(self._queries[query : query + 1], rows[None], vectors[None], self._k)
        self._results[query] = merge_top_k([self._results[query], new], self._k)
        if len(similarities := self._results[query][1][0]) == self._k:
            self._bar[query] = float(similarities[-1])  # a higher row of the same similarity comes after


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
