"""The stored vectors of one shard: float16 blocks by row, exact similarities to a few rows, and their files.

On a GPU a float32 query is the sum of two float16 vectors, hi + lo, to 22 bits. Tensor cores compute two float16
products with float32 sums many times faster than one float32 product, and need no copy of the stored vectors.

A file holds float16 [rows, D] as numpy writes them, and is mapped without a descriptor that stays open. A missing
or damaged file raises UserError; a system that opens or maps no more files raises RunError.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from replug.config.errors import RunError, UserError
from replug.data.files import SYSTEM_LIMIT, reading


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


# Files --------------------------------------------------------------------------------------------------------------


MEND = "remove it and run the command that built the index: it makes only the missing files"
ITEM_BYTES = 2  # of float16


def write_vectors(path: Path, vectors: np.ndarray) -> int:
    """Write vectors [rows, D] as float16; returns the rows. Raises OSError if the disk does not take all of it."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float16)
    with path.open("wb") as file:  # given a file, np.save ignores a failure to write the last bytes
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(vectors))
        file.write(vectors.data)
    return len(vectors)


def map_vectors(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Map the vectors of a file, which are read when they are first used. Raises UserError for another shape.

    By torch, since each of Python's own maps keeps a descriptor open.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; {MEND}")
    with reading(path), path.open("rb") as file:
        try:
            if (version := np.lib.format.read_magic(file)) != (1, 0):
                raise ValueError(f"format {version}")
            actual, _, dtype = np.lib.format.read_array_header_1_0(file)
        except ValueError as error:
            raise UserError(f"{path} is damaged, it holds no vectors ({error}); {MEND}") from error
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    if actual != shape or dtype != np.float16:
        raise UserError(f"{path} holds {dtype} {list(actual)}, expected float16 {list(shape)}; {MEND}")
    if size != start + ITEM_BYTES * math.prod(shape):
        raise UserError(f"{path} is damaged, it has {size} bytes; {MEND}")
    try:  # private and writable: torch warns of read-only arrays
        whole = torch.from_file(str(path), shared=False, size=size // ITEM_BYTES, dtype=torch.float16)
    except RuntimeError as error:  # the file was just read, so the system failed
        raise RunError(f"{path} cannot be mapped: {str(error).rpartition(': ')[2]}; {SYSTEM_LIMIT}") from error
    return whole[start // ITEM_BYTES :].view(shape).numpy()
