"""What the benchmarks of the index share: versions filled from a matrix of vectors, memory, interleaved rounds."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray

from index_workers import build_steps
from index_workers.kinds import IndexKind
from index_workers.service import IndexService, IndexSettings
from index_workers.version_store import BuildPlan, VersionStore

BLOCK_DOCUMENTS = 65_536


def make_plan(version: int, vectors: np.ndarray, kind: IndexKind) -> BuildPlan:
    """A plan for vectors [N, D] that come from no encoder."""
    return BuildPlan(
        version=version,
        step=0,
        weights_sha256="0" * 64,
        corpus_path="none",
        corpus_sha256="0" * 64,
        num_documents=len(vectors),
        block_documents=BLOCK_DOCUMENTS,
        similarity="dot",
        max_tokens=1,
        dim=vectors.shape[1],
        dtype="float32",
        tokens_per_batch=1,
        kind=kind,
    )


def write_version(store: VersionStore, version: int, vectors: np.ndarray, kind: IndexKind) -> dict[str, float]:
    """Write and publish vectors [N, D] as a version; returns the seconds of each part."""
    plan = make_plan(version, vectors, kind)
    store.folder(version).mkdir(parents=True, exist_ok=True)
    missing, seconds = store.begin(plan), {}
    with timed(seconds, "blocks"):
        for block in missing.blocks:
            store.write_block(version, block, vectors[slice_of(plan.rows_of_block(block))])
    with timed(seconds, "train"):
        if missing.quantizer:
            build_steps.make_quantizer(store, plan)
    with timed(seconds, "add"):
        for shard in missing.shards:
            build_steps.build_shard(store, plan, shard)
    store.publish(plan)
    return seconds


def link_version(store: VersionStore, version: int, source: int) -> None:
    """The same files under another number, so that a swap has something to swap to."""
    target = store.folder(version)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in store.folder(source).iterdir():
        if path.name != "manifest.json":
            os.link(path, target / path.name)
    store.publish(BuildPlan(**{**vars(store.plan(source)), "version": version}))


def slice_of(rows: range) -> slice:
    return slice(rows.start, rows.stop)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


@contextmanager
def serving(root: Path, threads: int) -> Iterator[IndexService]:
    """A service with one searcher over the versions under `root`; Ray must have been started."""
    service = IndexService(root, IndexSettings(threads=threads))
    service.searchers  # noqa: B018
    try:
        yield service
    finally:
        service.close()


def searcher_memory(service: IndexService) -> dict[str, int]:
    """Bytes of the searcher's process: `anonymous` ones are its own, `file` ones are mapped and can be dropped."""
    pid = ray.get(service.searchers[0].__ray_call__.remote(lambda searcher: os.getpid()))
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: 1024 * int(lines[key].split()[0]) for name, key in (("anonymous", "RssAnon"), ("file", "RssFile"))}


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one that does not count; what disturbs a round disturbs all of it."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio(seconds: list[float], others: list[float]) -> float:
    """Median over the rounds of one call's time in the other's."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def fitted_exponent(sizes: list[int], seconds: list[float]) -> float:
    """e of seconds ~ size ** e, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
