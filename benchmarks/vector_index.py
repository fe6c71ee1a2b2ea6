"""What the benchmarks of the index share: versions filled from a matrix of vectors, memory, interleaved rounds."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder
from replug.index_workers.kinds import IndexKind
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import VersionStore

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
    (files, needs_quantizer, shards), seconds = store.begin(plan), {}
    with timed(seconds, "blocks"):
        for file in files:
            store.write_vectors(version, file, vectors[slice_of(plan.rows_of_file(file))])
    with timed(seconds, "train"):
        if needs_quantizer:
            Builder(store.root, 1).make_quantizer(plan)
    with timed(seconds, "add"):
        for shard in shards:
            Builder(store.root, 1).build_shard(plan, shard)
    store.publish(plan)
    return seconds


def copy_version(store: VersionStore, version: int, source: int) -> None:
    """The same version under another number, in files of its own: a swap has something to swap to."""
    target = store.folder(version)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in store.folder(source).iterdir():
        if path.name != "manifest.json":
            shutil.copyfile(path, target / path.name)
    store.publish(replace(store.plan(source), version=version))


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
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the searcher
    service = IndexService(root)
    ray.get(service.searchers.actors[0].held.remote())  # until it is there
    try:
        yield service
    finally:
        service.close()


def searcher_pid(service: IndexService) -> int:
    return ray.get(service.searchers.actors[0].__ray_call__.remote(lambda searcher: os.getpid()))


def memory_of(pid: int) -> dict[str, int]:
    """Resident bytes of a process: `anonymous` ones are its own, `file` ones are mapped and can be dropped."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: 1024 * int(lines[key].split()[0]) for name, key in (("anonymous", "RssAnon"), ("file", "RssFile"))}


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of a call in each round: by the clock, and of the processors, which other programs hardly change."""

    wall: list[float]
    cpu: list[float]

    def shown(self, reference: "Taken") -> str:
        """Medians, and the medians of the ratios to another call in the same rounds."""
        return (
            f"median {1000 * statistics.median(self.wall):7.1f} ms, least {1000 * min(self.wall):7.1f} ms, "
            f"{paired_ratio(self.wall, reference.wall):6.2f}; "
            f"processor {1000 * statistics.median(self.cpu):7.1f} ms, {paired_ratio(self.cpu, reference.cpu):6.2f}"
        )


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, pids: Sequence[int] = ()) -> dict[str, Taken]:
    """Each call once in each round, after one that does not count; what disturbs a round disturbs all of it.

    Processor time is that of this process and of `pids`.
    """
    pids = [os.getpid(), *pids]
    for call in calls.values():
        call()
    taken: dict[str, Taken] = {name: Taken([], []) for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), cpu_seconds(pids)
            call()
            taken[name].wall.append(time.perf_counter() - start)
            taken[name].cpu.append(cpu_seconds(pids) - cpu_start)
    return taken


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time of all threads of these processes until now."""
    files = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in files) / 1e9


def paired_ratio(seconds: list[float], others: list[float]) -> float:
    """Median over the rounds of one call's time in the other's."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))
