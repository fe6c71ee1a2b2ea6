"""The only module that knows FAISS: exact inner-product search over one part of the corpus."""

from collections.abc import Iterable

import faiss
import numpy as np


class FaissShard:
    """Vectors of rows `first_row`, `first_row + 1`, ... `kind` is `flat` (float32) or `flat_fp16`.

    Both compare a query with every vector. Filled block by block and never written again.
    """

    def __init__(self, dim: int, kind: str, first_row: int, blocks: Iterable[np.ndarray]) -> None:
        self._index = _make_index(dim, kind)
        self.first_row = first_row
        for block in blocks:
            self._index.add(np.ascontiguousarray(block, dtype=np.float32))

    def __len__(self) -> int:
        return self._index.ntotal

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [B, k'] of the corpus and inner products [B, k'], best first; k' is k or the shard's size."""
        if not len(self):  # more shards than blocks; FAISS refuses to look for nothing
            return np.empty((len(queries), 0), dtype=np.int64), np.empty((len(queries), 0), dtype=np.float32)
        similarities, rows = self._index.search(np.ascontiguousarray(queries, dtype=np.float32), min(k, len(self)))
        return rows + self.first_row, similarities


def _make_index(dim: int, kind: str) -> faiss.Index:
    if kind == "flat":
        return faiss.IndexFlatIP(dim)
    if kind == "flat_fp16":
        return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    raise ValueError(f"index kind {kind!r} is unknown; expected flat or flat_fp16")


def set_search_threads(threads: int) -> None:
    """CPU threads of every search in this process."""
    faiss.omp_set_num_threads(threads)
