"""One shard's searcher: calls answered together, versions held and let go."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.index_workers import searcher as searcher_module
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.searcher import Found, Searcher
from replug.index_workers.version_store import VersionStore
from tests.support import index_versions
from tests.support.index_versions import PLAN, save_weights

DIM, ROWS, BLOCK = 16, 300, 50
RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((ROWS, DIM)).astype(np.float32)
EXACT = replace(PLAN, version=0, num_documents=ROWS, block_documents=BLOCK, dim=DIM)


def publish(store: VersionStore, plan: BuildPlan, vectors: np.ndarray = VECTORS) -> None:
    store.save_snapshot(plan.version, save_weights(b"one"))
    store.begin(plan)
    index_versions.publish(store, plan, vectors)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Version 0 is published."""
    store = VersionStore(tmp_path / "index")
    publish(store, EXACT)
    return store


class RecordingShard:
    """Row i's similarity is the query's first number minus i. Notes each batch, and waits until it is let on."""

    is_independent = True

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.begun, self.let_on = threading.Semaphore(0), threading.Event()

    def __len__(self) -> int:
        return 100

    def search(self, queries: np.ndarray, k: int) -> Found:
        self.batches.append((len(queries), k))
        self.begun.release()
        assert self.let_on.wait(100)
        if (queries < 0).any():
            raise RuntimeError("a negative query")
        rows = np.tile(np.arange(k), (len(queries), 1))
        return rows, queries[:, :1] - rows


@pytest.fixture
def recording(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> tuple[Searcher, RecordingShard]:
    shard = RecordingShard()
    monkeypatch.setattr(searcher_module, "open_shard", lambda *_: shard)
    searcher = Searcher(store.root, 0, 1, threads=1)
    searcher.load(0)
    return searcher, shard


def query(number: float, rows: int = 1) -> np.ndarray:
    return np.full((rows, DIM), number, dtype=np.float32)


# Versions -------------------------------------------------------------------------------------------------


def test_a_search_under_way_ends_on_the_version_it_began_on(recording) -> None:
    searcher, shard = recording
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(searcher.search, 0, query(1), 3)
        assert shard.begun.acquire(timeout=100)
        searcher.release(keep=[])
        assert searcher.held() == []
        shard.let_on.set()
        assert found.result(100)[0].tolist() == [[0, 1, 2]]


# What is built of the vectors -----------------------------------------------------------------------------


def test_loading_yields_to_searches_in_a_process_of_low_priority(store: VersionStore, monkeypatch) -> None:
    """Ray's workers run at 15, and only root may raise a priority: a fixed one ended everybody else's training."""
    priorities = []

    def open_shard(*_) -> RecordingShard:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return RecordingShard()

    def load() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        Searcher(store.root, 0, 1, threads=1).load(0)

    monkeypatch.setattr(searcher_module, "open_shard", open_shard)
    with ThreadPoolExecutor(1) as thread:  # of its own, since it keeps the priority
        thread.submit(load).result()
    assert priorities == [19]
