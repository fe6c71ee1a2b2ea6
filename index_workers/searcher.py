"""Serving searches over one shard. A plain class; `service` makes actors of it.

A version is loaded when it is first asked for, so a searcher that was killed and restarted answers
again by itself, from the published files.
"""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from replug.cluster.gpus import Busy, keep_to_memory_bound, own_devices
from replug.config.errors import UserError
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.exact_search import ExactShard
from replug.index_workers.faiss_index import FaissShard, set_search_threads
from replug.index_workers.vectors import BlockVectors
from replug.index_workers.version_store import VersionStore

Found = tuple[np.ndarray, np.ndarray]  # rows of the corpus and inner products [B, <= k], best first


class Shard(Protocol):
    """A part of one version, whatever its kind.

    `is_independent`: the answer to a query follows from it alone, so several callers' may be found together.
    """

    is_independent: bool

    def __len__(self) -> int: ...

    def search(self, queries: np.ndarray, k: int) -> Found: ...


class LoadedShard:
    """One version's shard. Calls that arrive while it searches are answered together by the next search.

    Unless that could change an answer: what a lossy kind finds depends on the k and, in last bits, on the batch.
    """

    def __init__(self, shard: Shard, fingerprint: str, thread: ThreadPoolExecutor) -> None:
        self.shard, self.fingerprint, self._thread = shard, fingerprint, thread
        self._waiting: list[tuple[np.ndarray, int, Future[tuple[Found, float]]]] = []
        self._adding = threading.Lock()

    def search(self, queries: np.ndarray, k: int) -> tuple[Found, float]:
        """Return what is found, and this call's part of the seconds that the search took."""
        answer: Future[tuple[Found, float]] = Future()
        with self._adding:  # together, so that every call is answered by the end of its own turn
            self._waiting.append((np.ascontiguousarray(queries, dtype=np.float32), k, answer))
            self._thread.submit(self._answer_waiting)
        return answer.result()

    def _answer_waiting(self) -> None:
        with self._adding:
            count = len(self._waiting) if self.shard.is_independent else 1
            calls, self._waiting = self._waiting[:count], self._waiting[count:]
        if not calls:  # answered with an earlier one
            return
        began, start = time.monotonic(), 0
        try:
            together, most = np.concatenate([queries for queries, _, _ in calls]), max(k for _, k, _ in calls)
            rows, similarities = self.shard.search(together, most)
            seconds = (time.monotonic() - began) / len(rows)
            for queries, k, answer in calls:
                own = slice(start, start := start + len(queries))
                answer.set_result(((rows[own, :k], similarities[own, :k]), seconds * len(queries)))
        except Exception as error:  # noqa: BLE001 - every caller of the batch raises it
            for _, _, answer in calls:
                if not answer.done():
                    answer.set_exception(error)


class Searcher:
    """Shard `shard` of `num_shards`. Several threads may call it at once."""

    def __init__(self, root: Path, shard: int, num_shards: int, threads: int, device: str = "cpu") -> None:
        keep_to_memory_bound()
        set_search_threads(threads)
        torch.set_num_threads(threads)
        self._store = VersionStore(root)
        self._shard, self._num_shards, self._device = shard, num_shards, device
        self._devices = own_devices()
        self._versions: dict[int, LoadedShard] = {}
        self._loading = threading.Lock()
        self._searching = ThreadPoolExecutor(1)  # one, since each thread that multiplies keeps buffers of its own

    def search(self, version: int, queries: np.ndarray, k: int) -> Found:
        """Return rows and similarities [B, <=k] of the nearest documents of this shard in one version."""
        return self.search_timed(version, queries, k)[0]

    def search_timed(self, version: int, queries: np.ndarray, k: int) -> tuple[Found, Busy]:
        """Return the same as `search`, with what it took."""
        loaded = self._versions.get(version) or self._load_once(version)
        found, seconds = loaded.search(queries, k)
        return found, Busy(seconds, self._devices)

    def load(self, version: int) -> int:
        """Load a version beside those already held; returns the number of documents of this shard.

        One that was built anew since it was loaded is loaded anew.
        """
        return len(self._load_once(version).shard)

    def release(self, keep: list[int]) -> None:
        """Drop the other versions; searches under way finish on the one they began on."""
        with self._loading:
            self._versions = {version: loaded for version, loaded in self._versions.items() if version in keep}

    def ping(self) -> None:
        """Answer beside searches and loading, as long as the process runs."""

    def held(self) -> list[int]:
        """Return versions in memory."""
        return sorted(self._versions)

    def _load_once(self, version: int) -> LoadedShard:
        with self._loading:
            if version not in self._versions or self._versions[version].fingerprint != self._store.fingerprint(version):
                with ThreadPoolExecutor(1, initializer=_yield_to_searches) as thread:
                    loaded = thread.submit(self._open, version).result()
                self._versions = {**self._versions, version: loaded}
            return self._versions[version]

    def _open(self, version: int) -> LoadedShard:
        fingerprint = self._store.fingerprint(version)
        plan = self._store.plan(version)
        shard = open_shard(self._store, plan, self._shard, self._num_shards, self._device)
        return LoadedShard(shard, fingerprint, self._searching)


def _yield_to_searches() -> None:
    """For a thread of its own, since it may not raise its priority again: loading reads and compares everything.

    Counted from the process' own priority, which Ray lowers to 15: only root may raise it again. Not far below it:
    where LMs keep all cores busy, a refresh must come to its end too.
    """
    here = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, here, os.getpriority(os.PRIO_PROCESS, here) + 4)  # 19, the lowest, beyond


def open_shard(store: VersionStore, plan: BuildPlan, shard: int, num_shards: int, device: str = "cpu") -> Shard:
    """Open one shard of a published version, in main memory or on `cuda`. Raises UserError naming a damaged file."""
    if plan.kind.store and shard == 0:  # further shards have no documents
        from replug.index_workers.store_shard import StoreShard  # brings the encoder's libraries, seconds to import

        return StoreShard(store.corpus_path(plan), plan.similarity)
    if not plan.kind.is_exact and num_shards != plan.num_shards:
        raise UserError(f"index version {plan.version} has {plan.num_shards} shards, asked for {num_shards}")
    files = plan.files_of_shard(shard, num_shards) if plan.kind.is_exact or plan.kind.rerank else range(0)
    if not plan.kind.is_exact:  # before FAISS reads it, which trusts its files
        store.check(plan.version, [store.shard_path(plan.version, shard)])
    with store.checking(plan.version, store.vectors_paths(plan, files)):
        vectors = BlockVectors(plan.rows_of_shard(shard, num_shards).start, store.open_vectors(plan, files), plan.dim)
        if plan.kind.is_exact:
            return ExactShard(vectors, torch.device(device))
        path, on_gpu = store.shard_path(plan.version, shard), device == "cuda"
        return FaissShard(path, vectors.first_row, plan.kind, vectors if plan.kind.rerank else None, on_gpu)
