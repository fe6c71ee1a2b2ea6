"""The stored vectors of a shard, and exact search over them: a matrix product and a top-k, chunk by chunk.

On a CPU the vectors stay memory-mapped files and a chunk becomes float32 in one small buffer, so search takes
little memory beside the vectors. A GPU receives them once, block by block, and multiplies them in float16: a float32
query is the sum of two float16 vectors, hi + lo, to 22 bits. Tensor cores compute two float16 products with float32
sums many times faster than one float32 product. The CPU sums the similarities of a result, by `order_exactly`, for
candidates of either device.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

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


class BlockVectors:
    """Blocks [rows, D] float16 of rows `first_row`, `first_row + 1`, ...; all but the last of equal length."""

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

    Summed in float64, so that a document's similarity does not depend on the batch, the hardware or the index
    kind; equal ones come in the order of their rows.
    """
    products = np.einsum("bd,bcd->bc", queries.astype(np.float64), vectors.astype(np.float64))
    similarities = products.astype(np.float32)
    order = np.lexsort((rows, -similarities), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(similarities, order, axis=1)


def most_similar(
    queries: np.ndarray, rows: np.ndarray, vectors: np.ndarray, keep: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce the candidates [B, C] and their vectors to the largest products in float32: [B, <=keep]."""
    if rows.shape[1] <= keep:
        return rows, vectors
    products = torch.bmm(torch.from_numpy(vectors).float(), torch.from_numpy(queries)[:, :, None])[:, :, 0]
    kept = products.topk(keep, dim=1, sorted=False).indices.numpy()
    return np.take_along_axis(rows, kept, axis=1), vectors[np.arange(len(rows))[:, None], kept]


LOW = 2.0**11  # factor that scales lo up in float16, where small numbers lose bits


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
        if vectors.device.type == "cpu":  # no such product there; float32 holds products of float16 exactly
            products = vectors.float() @ self._halves.float()
        else:
            products = torch.mm(vectors, self._halves, out_dtype=torch.float32)
        high, low = products.chunk(2, dim=1)
        return high.add_(low, alpha=1 / LOW).mul_(self._scale)


class MappedVectors:
    """Vectors [rows, D] float16 in files that stay mapped; the CPU multiplies them in float32."""

    device, rounding = torch.device("cpu"), ROUNDING

    def __init__(self, vectors: BlockVectors) -> None:
        self._vectors = vectors

    def take(self, places: Tensor) -> Tensor:
        return torch.from_numpy(self._vectors.take(places.numpy() + self._vectors.first_row))

    def pieces(self) -> Iterator[Tensor]:
        """Yield the vectors, at most a chunk's rows at a time."""
        return (piece for block in self._vectors.blocks for piece in torch.from_numpy(block).split(CHUNK_ROWS))

    def products(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield first place and products [rows, B] of each stretch of chunks; the buffer is used again for the next."""
        transposed = queries.T.contiguous()
        rows = min(max(CHUNK_ROWS, STRETCH_PRODUCTS // max(1, len(queries))), len(self._vectors))
        stretch = torch.empty(rows, len(queries))
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
        buffer = torch.empty(min(CHUNK_ROWS, len(self._vectors)), self._vectors.dim)
        filled = 0
        for piece in self.pieces():
            if filled + len(piece) > len(buffer):
                yield buffer[:filled]
                filled = 0
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled:
            yield buffer[:filled]


class CopiedVectors:
    """Vectors [rows, D] float16 as one matrix on a device, multiplied in float16 by split queries."""

    rounding = ROUNDING_SPLIT

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self.device = device
        self._matrix = torch.empty(len(vectors), vectors.dim, dtype=torch.float16, device=device)
        start = 0
        for block in vectors.blocks:  # so that the host never holds the whole matrix
            self._matrix[start : start + len(block)] = torch.from_numpy(block)
            start += len(block)

    def take(self, places: Tensor) -> Tensor:
        return self._matrix.index_select(0, places.flatten()).view(*places.shape, -1)

    def pieces(self, most: int = CHUNK_ROWS_GPU) -> Sequence[Tensor]:
        return self._matrix.split(min(most, CHUNK_ROWS_GPU))

    def products(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield first place and products [rows, B] of each piece."""
        split, start = SplitQueries(queries), 0
        for piece in self.pieces(PRODUCTS_GPU // max(1, len(queries))):
            yield start, split.products(piece)
            start += len(piece)


class ExactShard:
    """Exact search over the immutable vectors of one shard."""

    is_independent = True

    def __init__(self, vectors: BlockVectors, device: torch.device) -> None:
        self._first_row, self._rows, self._dim = vectors.first_row, len(vectors), vectors.dim
        self._vectors = MappedVectors(vectors) if device.type == "cpu" else CopiedVectors(vectors, device)
        self._max_length: float | None = None

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
        wanted = min(k + margin, len(self))
        products, places = self._candidates(torch.from_numpy(queries).to(self._vectors.device), wanted)
        parts = []
        for some in places.split(max(1, CANDIDATE_NUMBERS // (len(queries) * self._dim)), dim=1):
            rows, vectors = some.cpu().numpy() + self._first_row, self._vectors.take(some).cpu().numpy()
            parts.append(order_exactly(queries, rows, vectors, k))
        nearest, similarities = parts[0] if len(parts) == 1 else merge_top_k(parts, k)
        if places.shape[1] < len(self):
            least = products.amin(1).cpu().numpy()  # no other document has a larger product
            lengths = _lengths(queries) * self._longest(vectors)
            unsure = similarities[:, -1] - least <= self._vectors.rounding * lengths
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
            self._max_length = max(float(piece.float().norm(dim=1).max()) for piece in self._vectors.pieces())
        return self._max_length

    @torch.inference_mode()
    def _candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the largest products [B, k] and their places in the shard, in any order."""
        best = torch.empty(len(queries), 0, device=self._vectors.device)
        places = torch.empty(len(queries), 0, dtype=torch.long, device=self._vectors.device)
        for start, products in self._vectors.products(queries):
            values, at = _top_k(products, k)
            best, places = torch.cat([best, values], dim=1), torch.cat([places, at + start], dim=1)
            keep = best.topk(min(k, best.shape[1]), sorted=False).indices
            best, places = best.gather(1, keep), places.gather(1, keep)
        return best, places


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


# Results of several shards, or versions ---------------------------------------------------------------------------


def merge_top_k(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge every shard's rows and similarities [B, <=k] into rows [B, k] and similarities [B, k], best first.

    Equal similarities come in the order of their rows.
    """
    rows = np.concatenate([rows for rows, _ in parts], axis=1)
    similarities = np.concatenate([similarities for _, similarities in parts], axis=1)
    order = np.lexsort((rows, -similarities), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(similarities, order, axis=1)


Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
MORE = 8  # documents requested beyond k at first


def search_excluding(
    search: Search,
    sources_of: Callable[[np.ndarray], list[str]],
    queries: np.ndarray,
    k: int,
    exclude: Sequence[str | None],
    at_least: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and similarities [B, k] without documents of each query's excluded source.

    Requests more until every query has k. If the corpus has fewer documents of other sources, the result has fewer
    columns. Raises ValueError if it would have fewer than `at_least`.
    """
    wanted = k + MORE
    while True:
        rows, similarities = search(queries, wanted)
        sources = np.array(sources_of(rows.ravel()), dtype=object).reshape(rows.shape)
        allowed = sources != np.array(exclude, dtype=object)[:, None]
        if (allowed.sum(axis=1) >= k).all():
            return _first_k(rows, allowed, k), _first_k(similarities, allowed, k)
        if rows.shape[1] < wanted:  # that was the whole corpus
            counts = allowed.sum(axis=1)
            if counts.min() < at_least:
                name = exclude[int(np.argmin(counts))]
                raise ValueError(f"the corpus has fewer than {at_least} documents that are not of source {name}")
            k = int(counts.min())
        else:
            wanted *= 2


def _first_k(values: np.ndarray, allowed: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(values, order, axis=1)


def top_k_overlap(rows: np.ndarray, others: np.ndarray) -> float:
    """Return the mean share of each query's documents [B, K] that are also in `others` [B, K]."""
    shares = [len(np.intersect1d(a, b)) / len(a) for a, b in zip(rows, others, strict=True)]
    return float(np.mean(shares))
