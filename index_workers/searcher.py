"""Serve searches over one shard. A plain class; `service` makes actors of it.

The first search of a version loads it, so a restarted searcher recovers by itself, from the published files.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from replug.config.errors import UserError
from replug.data.store import StoredCorpus, comparable
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.exact_search import BlockVectors, ExactShard, order_exactly
from replug.index_workers.faiss_index import FaissShard, set_search_threads
from replug.index_workers.version_store import VersionStore

Found = tuple[np.ndarray, np.ndarray]  # rows of the corpus and inner products [B, <= k], best first


class Shard(Protocol):
    """A part of one version of any kind.

    `is_independent`: the answer to a query follows from it alone, so a server may batch queries of several callers.
    """

    is_independent: bool

    def __len__(self) -> int: ...

    def search(self, queries: np.ndarray, k: int) -> Found: ...


class StoreShard:
    """Searches the store of a corpus, and keeps its results. Similarities are products with the stored vectors."""

    is_independent = False  # results of an approximate index depend on k

    def __init__(self, documents: Path, similarity: str) -> None:
        self._corpus, self._similarity = StoredCorpus(documents), similarity
        self._source = self._corpus.open()

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and similarities [B, <= k], best first. Raises UserError if the store finds too few."""
        results = self._source.search(queries, min(k, len(self)), self._similarity)
        if (fewest := min(map(len, results))) < min(k, len(self)):
            raise UserError(
                f"data.corpus: {self._corpus.url} finds {fewest} of the {min(k, len(self))} requested documents; "
                "let its index search further, as by &options=-c%20ivfflat.probes%3D100, or search without one"
            )
        rows = np.stack([self._corpus.keep(documents, self._source) for documents in results])
        vectors = np.stack([[document.vector for document in documents] for documents in results])
        return order_exactly(queries, rows, comparable(vectors, self._similarity), k)


class Searcher:
    """Shard `shard` of `num_shards`. Several threads may call it at once."""

    def __init__(self, root: Path, shard: int, num_shards: int, threads: int, device: str = "cpu") -> None:
        from replug.cluster.places import keep_to_memory_bound  # imports Ray, needed only in actors

        keep_to_memory_bound()
        set_search_threads(threads)
        torch.set_num_threads(threads)
        self._store = VersionStore(root)
        self._shard, self._num_shards, self._device = shard, num_shards, device
        self._versions: dict[int, tuple[Shard, str]] = {}  # with the fingerprint of the version's files
        self._loading = threading.Lock()
        self._searching = ThreadPoolExecutor(1)  # one, since each computing thread keeps its buffers

    def search(self, version: int, queries: np.ndarray, k: int) -> Found:
        """Return rows and similarities [B, <=k] of the nearest documents of this shard in one version."""
        loaded = self._versions.get(version)
        shard = loaded[0] if loaded else self._load_once(version)
        return self._searching.submit(shard.search, np.ascontiguousarray(queries, dtype=np.float32), k).result()

    def load(self, version: int) -> int:
        """Load a version beside the loaded ones; returns the number of documents of this shard.

        Reloads a version that was rebuilt since it was loaded.
        """
        return len(self._load_once(version))

    def release(self, keep: list[int]) -> None:
        """Drop the other versions; searches under way finish on their version."""
        with self._loading:
            self._versions = {version: loaded for version, loaded in self._versions.items() if version in keep}

    def _load_once(self, version: int) -> Shard:
        with self._loading:
            plan, fingerprint = self._store.plan(version), self._store.fingerprint(version)
            if version not in self._versions or self._versions[version][1] != fingerprint:
                with ThreadPoolExecutor(1, initializer=_yield_to_searches) as thread:
                    shard = thread.submit(open_shard, self._store, plan, self._shard, self._num_shards, self._device)
                    self._versions = {**self._versions, version: (shard.result(), fingerprint)}
            return self._versions[version][0]


def _yield_to_searches() -> None:
    """Lower the priority of a thread that loads a version, since loading reads and compares everything.

    Call in a separate thread, since only root may raise the priority again. It stays near the priority of searches, so
    that a refresh also ends while LMs keep all cores busy.
    """
    here = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, here, min(19, os.getpriority(os.PRIO_PROCESS, here) + 4))


def open_shard(store: VersionStore, plan: BuildPlan, shard: int, num_shards: int, device: str = "cpu") -> Shard:
    """Open one shard of a published version; exact vectors may be on `cuda`. Raises UserError naming a damaged file."""
    if plan.kind.store and shard == 0:  # further shards have no documents
        return StoreShard(store.corpus_path(plan), plan.similarity)
    path = store.shard_path(plan.version, shard)
    if not plan.kind.is_exact and num_shards != plan.num_shards:
        raise UserError(f"index version {plan.version} has {plan.num_shards} shards, index.num_shards is {num_shards}")
    files = plan.files_of_shard(shard, num_shards)
    # FAISS trusts its files.
    store.check(plan.version, [*([] if plan.kind.is_exact else [path]), *store.vectors_paths(plan, files)])
    vectors = BlockVectors(plan.rows_of_shard(shard, num_shards).start, store.open_vectors(plan, files), plan.dim)
    return ExactShard(vectors, torch.device(device)) if plan.kind.is_exact else FaissShard(path, plan.kind, vectors)
