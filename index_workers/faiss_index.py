"""The only module that knows FAISS: the lossy kinds, trained, filled block by block, written and searched.

Inner products throughout. With faiss-gpu a searcher that has a GPU copies its index there; what FAISS 1.15 does not
copy is refused by `check_kind`, before anything is embedded.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from replug.config.errors import RunError, UserError
from replug.index_workers.exact_search import MARGIN, ExactShard
from replug.index_workers.kinds import (
    EXPECTED,
    MOST_LISTS_AT_ONCE,
    SEARCH_BYTES,
    IndexKind,
    num_centroids,
    num_lists,
)
from replug.index_workers.vectors import BlockVectors, most_similar, order_exactly

CUBLAS_BYTES = 96 << 20  # that FAISS takes beside its scratch memory: 70 MB on an H200
VERSIONS_AT_ONCE = 2  # that a searcher holds at most
PINNED_BYTES = 64 << 20  # of the host, through which FAISS copies to a GPU
QUERIES = 64  # searched at once; the vectors of their candidates are held in memory

# What FAISS can do on a GPU, by the sources of version 1.15.
MOST_ON_GPU = 2_048  # documents, and lists, of one search
CODES_ON_GPU = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # sub-vectors of a product quantizer
FLOAT32_CODES_ON_GPU = 48  # of more, the tables of a query fit a block's shared memory, 48 KiB, in float16 only
SCALARS_ON_GPU = tuple(
    getattr(faiss.ScalarQuantizer, f"QT_{name}")
    for name in ("8bit", "8bit_uniform", "8bit_direct", "6bit", "4bit", "4bit_uniform", "fp16")
)
FLAT = (faiss.IndexFlat, faiss.IndexFlatIP)
SCALAR_DIMS_ON_GPU = 6_143  # whose ranges fit a block's shared memory
TRAINS_ALONE = "\x01"  # FAISS's `quantizer_trains_alone` of a quantizer that is not filled with centroids


def check_kind(kind: IndexKind, dim: int, num_documents: int, k_on_gpu: int | None = None) -> None:
    """Raise UserError where FAISS cannot build this kind, or the corpus is too small to train it.

    `k_on_gpu` are the documents that a search on a GPU asks for; None where processors search.
    """
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
    if k_on_gpu is not None:
        _check_on_gpu(kind, index, min(k_on_gpu, num_documents))


def _check_on_gpu(kind: IndexKind, index: faiss.Index, k: int) -> None:
    """Raise UserError where FAISS does not hold such an index on a GPU, or not search it there for k documents."""
    if reason := refused_on_gpu(index):
        raise UserError(
            f"index.kind is {kind.factory}, which FAISS cannot hold on a GPU ({reason}); set index.gpus_per_searcher=0 "
            "to search it on processors, or expected flat_fp16, ivf_sq8 or IVF...,PQm with m sub-vectors of 8 bits"
        )
    for key, number in (("index.nprobe", kind.nprobe), ("retrieve.k times its candidates", k * kind.overretrieve)):
        if number > MOST_ON_GPU:
            raise UserError(
                f"{key} is {number}; expected at most {MOST_ON_GPU}, which is what FAISS looks for on a GPU: lower it, "
                "or set index.gpus_per_searcher=0 to search on processors"
            )


def refused_on_gpu(index: faiss.Index) -> str | None:
    """Return why `faiss.index_cpu_to_gpu` refuses such an index; None if it copies it."""
    index = _without_transforms(index)
    name = type(index).__name__
    if not isinstance(index, faiss.IndexIVF):
        whole = isinstance(index, faiss.IndexScalarQuantizer) and index.sq.qtype == faiss.ScalarQuantizer.QT_fp16
        return None if whole or type(index) in FLAT else f"{name} is not there"
    if type(quantizer := faiss.downcast_index(index.quantizer)) not in FLAT:
        return f"lists found by {type(quantizer).__name__} are not there"
    if type(index) is faiss.IndexIVFScalarQuantizer:
        known = index.sq.qtype in SCALARS_ON_GPU and index.d <= SCALAR_DIMS_ON_GPU
        return None if known else f"its scalar quantizer of {index.d} dimensions is not there"
    if type(index) is faiss.IndexIVFPQ:
        codes, bits = index.pq.M, index.pq.nbits
        known = bits == 8 and codes in CODES_ON_GPU
        return None if known else f"{codes} sub-vectors of {bits} bits: 8 bits and {CODES_ON_GPU} are there"
    return None if type(index) is faiss.IndexIVFFlat else f"{name} is not there"


def _without_transforms(index: faiss.Index) -> faiss.Index:
    """Return the index that a rotation or projection is before."""
    return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index


def train_quantizer(kind: IndexKind, sample: np.ndarray, out: Path) -> int:
    """Write an empty index that has learnt what it needs from a sample of vectors [N, D]; returns N."""
    assert kind.factory is not None
    index = faiss.index_factory(sample.shape[1], kind.factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        vectors = np.ascontiguousarray(sample, dtype=np.float32)
        if num_lists(kind.factory) > MOST_LISTS_AT_ONCE:
            _train_lists(index, vectors)
        index.train(vectors)
    _write(index, out)
    return len(sample)


def _train_lists(index: Any, vectors: np.ndarray) -> None:
    """Give an index with very many lists their centroids; FAISS then trains what is not trained yet."""
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        transforms = [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]
        for transform in transforms:
            if not transform.is_trained:
                transform.train(vectors)
            vectors = transform.apply(vectors)
    lists: Any = _without_transforms(index)
    if lists.quantizer_trains_alone == TRAINS_ALONE:  # its lists are no centroids of k-means
        return
    centroids = two_level_centroids(vectors, lists.nlist, lists.cp.niter, lists.cp.spherical)
    lists.quantizer.train(centroids)
    lists.quantizer.add(centroids)


def two_level_centroids(vectors: np.ndarray, count: int, iterations: int, spherical: bool) -> np.ndarray:
    """Return centroids [count, D] of vectors [N, D]: of sqrt(count) clusters, then of each by its share.

    Each vector is compared with about 2 sqrt(count) centroids in an iteration, not with all: of 65,536, with 512.
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


def fill(quantizer: Path, blocks: Iterable[np.ndarray], out: Path) -> int:
    """Write the trained index with the vectors of all blocks in it; returns how many."""
    index = faiss.read_index(str(quantizer))
    for block in blocks:
        index.add(np.ascontiguousarray(block, dtype=np.float32))
    _write(index, out)
    return int(index.ntotal)


def count_vectors(path: Path) -> int:
    """Count the vectors that an index file holds."""
    return int(faiss.read_index(str(path), faiss.IO_FLAG_MMAP).ntotal)


class FaissShard:
    """A filled index over rows `first_row`, ...; with `vectors`, its candidates are ordered exactly."""

    is_independent = False

    def __init__(
        self, path: Path, first_row: int, kind: IndexKind, vectors: BlockVectors | None, on_gpu: bool = False
    ) -> None:
        index = faiss.read_index(str(path))
        self._index = _to_gpu(index) if on_gpu else index
        self._most = MOST_ON_GPU if on_gpu else sys.maxsize
        self._first_row, self._kind, self._vectors = first_row, kind, vectors
        self._lists = num_lists(kind.factory or "")

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and inner products [B, min(k, size)], best first, for queries [B, D].

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
        """Search as FAISS does; a query for which the lists hold too few vectors looks into twice as many.

        A graph may give up before it has found enough, and a GPU looks into so many lists for so many documents only;
        the vectors themselves answer then.
        """
        if wanted > self._most:
            return self._search_vectors(queries, wanted)
        similarities, places = self._search_lists(queries, wanted, probes := self._kind.nprobe)
        while len(short := np.flatnonzero((places < 0).any(axis=1))):
            if probes >= min(self._lists, self._most):
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
        parameters.nprobe = min(probes, self._lists, self._most)
        if isinstance(self._index, faiss.IndexPreTransform):  # a rotation before the lists
            inner, parameters = parameters, faiss.SearchParametersPreTransform()
            parameters.index_params = inner
        return self._index.search(queries, wanted, params=parameters)


def set_search_threads(threads: int) -> None:
    """Set the CPU threads of every search in this process."""
    faiss.omp_set_num_threads(threads)


def _write(index: faiss.Index, out: Path) -> None:
    try:
        with out.open("wb") as file:  # given a path, FAISS ignores that the last bytes could not be written
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
    except RuntimeError as error:  # FAISS's only kind of error; what can fail here is the disk
        raise OSError(_reason(error)) from error


def _to_gpu(index: faiss.Index) -> faiss.Index:
    """Copy the index to the first GPU that this process sees."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise UserError("index.gpus_per_searcher is set, but this FAISS knows no GPU: pip install '.[gpu]' instead")
    options = faiss.GpuClonerOptions()
    codes = _without_transforms(index)
    options.useFloat16 = isinstance(codes, faiss.IndexIVFPQ) and codes.pq.M > FLOAT32_CODES_ON_GPU
    return faiss.index_cpu_to_gpu(_gpu_resources(), 0, index, options)


def _gpu_resources() -> Any:
    """Return the scratch memory of an index; FAISS would take 1.5 GiB, and pin 256 MiB.

    Each index has its own: FAISS lets one thread at a time use it, and a version is copied while another is searched.
    """
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(SEARCH_BYTES // VERSIONS_AT_ONCE - CUBLAS_BYTES)
    resources.setPinnedMemory(PINNED_BYTES)
    return resources


def _reason(error: RuntimeError) -> str:
    """Return a message without FAISS's own file names and function signatures."""
    return str(error).strip().splitlines()[-1].rpartition(": ")[2]
