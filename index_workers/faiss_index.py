"""Train, fill, write and search the lossy kinds by FAISS. No other module imports it.

Inner products throughout, on CPUs.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from replug.config.errors import UserError
from replug.index_workers.exact_search import MARGIN, BlockVectors, ExactShard, most_similar, order_exactly
from replug.index_workers.kinds import EXPECTED, MOST_LISTS_AT_ONCE, IndexKind, num_centroids, num_lists

QUERIES = 64  # searched at once; the vectors of their candidates are held in memory
TRAINS_ALONE = "\x01"  # FAISS's `quantizer_trains_alone` of a quantizer that is not filled with centroids


def check_kind(kind: IndexKind, dim: int, num_documents: int) -> None:
    """Raise UserError if FAISS cannot build this kind, or the corpus is too small to train it."""
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
            "ids, and the stored vectors order the candidates"
        )
    least = num_centroids(kind.factory)
    if not index.is_trained and num_documents < least:
        raise UserError(
            f"index.kind is {kind.factory}, which needs {least} documents to be trained; the corpus has {num_documents}"
        )


def train_quantizer(kind: IndexKind, sample: np.ndarray, out: Path) -> None:
    """Write an empty index trained on a sample of vectors [N, D]."""
    assert kind.factory is not None
    index = faiss.index_factory(sample.shape[1], kind.factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        vectors = np.ascontiguousarray(sample, dtype=np.float32)
        if num_lists(kind.factory) > MOST_LISTS_AT_ONCE:
            _train_lists(index, vectors)
        index.train(vectors)
    _write(index, out)


def _train_lists(index: Any, vectors: np.ndarray) -> None:
    """Give an index with very many lists their centroids; FAISS then trains the rest."""
    lists: Any = index
    if isinstance(index, faiss.IndexPreTransform):  # a rotation or projection before the lists
        lists = faiss.downcast_index(index.index)
        chain: Any = index.chain
        for transform in [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]:
            if not transform.is_trained:
                transform.train(vectors)
            vectors = transform.apply(vectors)
    if lists.quantizer_trains_alone != TRAINS_ALONE:
        centroids = two_level_centroids(vectors, lists.nlist, lists.cp.niter, lists.cp.spherical)
        lists.quantizer.train(centroids)
        lists.quantizer.add(centroids)


def two_level_centroids(vectors: np.ndarray, count: int, iterations: int, spherical: bool) -> np.ndarray:
    """Return centroids [count, D] of vectors [N, D]: of sqrt(count) clusters, then of each by its share.

    An iteration compares each vector with about 2 sqrt(count) centroids, not with all: 512 instead of 65,536.
    """

    def k_means(points: np.ndarray, k: int) -> faiss.Kmeans:
        means = faiss.Kmeans(points.shape[1], k, niter=iterations, spherical=spherical, min_points_per_centroid=1)
        means.train(points)
        return means

    coarse = k_means(vectors, math.isqrt(count))
    _, cluster_of = coarse.assign(vectors)
    sizes = np.bincount(cluster_of, minlength=coarse.k)
    shares = np.diff(np.cumsum(sizes) * count // len(vectors), prepend=0)  # a cluster of a few vectors may have none
    members = np.split(np.argsort(cluster_of, kind="stable"), np.cumsum(sizes)[:-1])
    return np.concatenate([k_means(vectors[of], int(k)).centroids for of, k in zip(members, shares, strict=True) if k])


def fill(quantizer: Path, blocks: Iterable[np.ndarray], out: Path) -> None:
    """Write the trained index with the vectors of all blocks added."""
    index = faiss.read_index(str(quantizer))
    for block in blocks:
        index.add(np.ascontiguousarray(block, dtype=np.float32))
    _write(index, out)


class FaissShard:
    """A filled index over rows `first_row`, ...; the stored vectors order its candidates exactly."""

    is_independent = False

    def __init__(self, path: Path, kind: IndexKind, vectors: BlockVectors) -> None:
        self._index = faiss.read_index(str(path))
        self._kind, self._vectors = kind, vectors

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and inner products [B, min(k, size)], best first, for queries [B, D]."""
        if not len(self):  # more shards than blocks; FAISS refuses k = 0
            return np.empty((len(queries), 0), dtype=np.int64), np.empty((len(queries), 0), dtype=np.float32)
        parts = [self._search_some(some, k) for some in np.split(queries, range(QUERIES, len(queries), QUERIES))]
        rows, similarities = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(similarities)

    def _search_some(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        wanted = min(k * self._kind.overretrieve, len(self))
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        rows = self._search_lists(queries, wanted) + self._vectors.first_row
        if len(short := np.flatnonzero((rows < self._vectors.first_row).any(axis=1))):  # few documents in these lists
            rows[short], _ = ExactShard(self._vectors, torch.device("cpu")).search(queries[short], wanted)
        rows, vectors = most_similar(queries, rows, self._vectors.take(rows), k + MARGIN)
        return order_exactly(queries, rows, vectors, k)

    def _search_lists(self, queries: np.ndarray, wanted: int) -> np.ndarray:
        """Return places [B, wanted] as FAISS finds them, -1 where it finds too few."""
        if not self._kind.nprobe:
            return self._index.search(queries, wanted)[1]
        parameters: Any = faiss.SearchParametersIVF()
        parameters.nprobe = self._kind.nprobe
        if isinstance(self._index, faiss.IndexPreTransform):  # a rotation before the lists
            inner, parameters = parameters, faiss.SearchParametersPreTransform()
            parameters.index_params = inner
        return self._index.search(queries, wanted, params=parameters)[1]


def set_search_threads(threads: int) -> None:
    """Set the CPU threads of every search in this process."""
    faiss.omp_set_num_threads(threads)


def _write(index: faiss.Index, out: Path) -> None:
    try:
        with out.open("wb") as file:  # given a path, FAISS ignores a failure to write the last bytes
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
    except RuntimeError as error:  # FAISS's only kind of error; here only the disk can fail
        raise OSError(_reason(error)) from error


def _reason(error: RuntimeError) -> str:
    """Return a message without FAISS's own file names and function signatures."""
    return str(error).strip().splitlines()[-1].rpartition(": ")[2]
