"""The only module that knows FAISS: the lossy kinds, trained, filled block by block, written and searched.

Inner products throughout. With faiss-gpu a searcher that has a GPU moves its index there.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from replug.configs.errors import RunError, UserError
from replug.index_workers.exact_search import MARGIN, ExactShard
from replug.index_workers.kinds import EXPECTED, IndexKind, num_centroids, num_lists
from replug.index_workers.vectors import BlockVectors, most_similar, order_exactly

QUERIES = 64  # searched at once; the vectors of their candidates are held in memory


def check_kind(kind: IndexKind, dim: int, num_documents: int) -> None:
    """Raise UserError where FAISS cannot build this kind, or the corpus is too small to train it."""
    if kind.factory is None:
        return
    try:
        index = faiss.index_factory(dim, kind.factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(
            f"index.kind is {kind.factory}; expected {EXPECTED} for {dim} dimensions ({_reason(error)})"
        ) from error
    if isinstance(index, faiss.IndexIDMap | faiss.IndexRefine):
        raise UserError(
            f"index.kind is {kind.factory}; expected it without IDMap and refinement: documents have their rows as "
            "ids, and index.rerank orders what is found"
        )
    least = num_centroids(kind.factory)
    if not index.is_trained and num_documents < least:
        raise UserError(
            f"index.kind is {kind.factory}, which needs {least} documents to be trained; the corpus has {num_documents}"
        )


def train_quantizer(kind: IndexKind, sample: np.ndarray, out: Path) -> int:
    """Write an empty index that has learnt what it needs from a sample of vectors [N, D]; returns N."""
    assert kind.factory is not None
    index = faiss.index_factory(sample.shape[1], kind.factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(np.ascontiguousarray(sample, dtype=np.float32))
    _write(index, out)
    return len(sample)


def fill(quantizer: Path, blocks: Iterable[np.ndarray], out: Path) -> int:
    """Write the trained index with the vectors of all blocks in it; returns how many."""
    index = faiss.read_index(str(quantizer))
    for block in blocks:
        index.add(np.ascontiguousarray(block, dtype=np.float32))
    _write(index, out)
    return int(index.ntotal)


def count_vectors(path: Path) -> int:
    """How many vectors an index file holds."""
    return int(faiss.read_index(str(path), faiss.IO_FLAG_MMAP).ntotal)


class FaissShard:
    """A filled index over rows `first_row`, ...; with `vectors`, its candidates are ordered exactly."""

    is_independent = False

    def __init__(
        self, path: Path, first_row: int, kind: IndexKind, vectors: BlockVectors | None, on_gpu: bool = False
    ) -> None:
        index = faiss.read_index(str(path))
        self._index = _to_gpu(index) if on_gpu else index
        self._first_row, self._kind, self._vectors = first_row, kind, vectors
        self._lists = num_lists(kind.factory or "")

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and inner products [B, min(k, size)], best first, for queries [B, D].

        The products are exact where there are vectors to order by, else the quantizer's.
        """
        if not len(self):  # more shards than blocks; FAISS refuses to look for nothing
            return np.empty((len(queries), 0), dtype=np.int64), np.empty((len(queries), 0), dtype=np.float32)
        parts = [self._search_some(some, k) for some in np.split(queries, range(QUERIES, len(queries), QUERIES))]
        rows, similarities = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def _search_some(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        wanted = min(k * self._kind.overretrieve, len(self))
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        similarities, places = self._search_all(queries, wanted)
        rows = places + self._first_row
        if self._vectors is None:
            return rows, similarities
        rows, vectors = most_similar(queries, rows, self._vectors.take(rows), k + MARGIN)
        return order_exactly(queries, rows, vectors, k)

    def _search_all(self, queries: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """As FAISS, but where the lists hold too few vectors for a query, in twice as many lists.

        A graph may give up before it has found enough; the vectors themselves answer then.
        """
        similarities, places = self._search_lists(queries, wanted, probes := self._kind.nprobe)
        while len(short := np.flatnonzero((places < 0).any(axis=1))):
            if probes >= self._lists:
                similarities[short], places[short] = self._search_vectors(queries[short], wanted)
                break
            probes *= 2
            similarities[short], places[short] = self._search_lists(queries[short], wanted, probes)
        return similarities, places

    def _search_vectors(self, queries: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        if self._vectors is None:
            raise RunError(
                f"index.kind {self._kind.factory} finds fewer than {wanted} of {len(self)} documents for a text; "
                "set index.rerank=stored, or take another kind"
            )
        rows, similarities = ExactShard(self._vectors, torch.device("cpu")).search(queries, wanted)
        return similarities, rows - self._first_row

    def _search_lists(self, queries: np.ndarray, wanted: int, probes: int) -> tuple[np.ndarray, np.ndarray]:
        if not self._lists:
            return self._index.search(queries, wanted)
        parameters: Any = faiss.SearchParametersIVF()
        parameters.nprobe = min(probes, self._lists)
        if isinstance(self._index, faiss.IndexPreTransform):  # a rotation before the lists
            inner, parameters = parameters, faiss.SearchParametersPreTransform()
            parameters.index_params = inner
        return self._index.search(queries, wanted, params=parameters)


def set_search_threads(threads: int) -> None:
    """CPU threads of every search in this process."""
    faiss.omp_set_num_threads(threads)


def _write(index: faiss.Index, out: Path) -> None:
    try:
        with out.open("wb") as file:  # given a path, FAISS ignores that the last bytes could not be written
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
    except RuntimeError as error:  # FAISS's only kind of error; what can fail here is the disk
        raise OSError(_reason(error)) from error


def _to_gpu(index: faiss.Index) -> faiss.Index:
    """Onto the first GPU that this process sees."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise UserError("index.gpus_per_searcher is set, but this FAISS knows no GPU: pip install '.[gpu]' instead")
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)


def _reason(error: RuntimeError) -> str:
    """What is behind FAISS's own file names and function signatures."""
    return str(error).strip().splitlines()[-1].rpartition(": ")[2]
