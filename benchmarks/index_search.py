"""Search a million vectors through the service: speed, memory, lossy kinds and swaps.

    python -m benchmarks.index_search --vectors VECTORS --queries QUERIES [--parts exact memory kinds swap]

VECTORS is any [N, D] float16 matrix of real embeddings with rows of norm 1, QUERIES a float32 [M, D] one of other
texts by the same encoder: `numpy.save(file, matrix)` of what e.g. a sentence encoder gives for passages of 128 tokens.
Random vectors will not do for `kinds`: they have no neighbours.
"""

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import ray
import torch

from benchmarks.machine import describe_machine
from benchmarks.vector_index import (
    BLOCK_DOCUMENTS,
    copy_version,
    interleaved,
    make_plan,
    memory_of,
    searcher_pid,
    serving,
    write_version,
)
from replug.cluster.ray_cluster import own_ray
from replug.index_workers.exact_search import top_k_overlap
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.index_workers.searcher import Shard, open_shard
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import VersionStore

K, BATCH = 20, 64
RAW_CHUNK_ROWS = (16_384, 65_536, 262_144)
KINDS = ("pq", "ivf_pq", "sq8", "ivf_sq8", "IVF4096,PQ128x4fs", "IVF4096,RaBitQfs")
PROBES, OVERRETRIEVE = (64, 128, 256), (1, 4, 8, 16)

Found = tuple[np.ndarray, np.ndarray]


@dataclass
class Setting:
    """What every part works on; `folder` holds the versions, number 1 is the exact one of all vectors."""

    vectors: np.ndarray  # [N, D] float16, mapped
    queries: np.ndarray  # [M, D] float32
    folder: Path
    threads: list[int]
    rounds: int
    kinds: list[str]
    versions: dict[str, tuple[int, dict[str, float]]] = field(default_factory=dict)

    @property
    def store(self) -> VersionStore:
        return VersionStore(self.folder)

    @property
    def batch(self) -> np.ndarray:
        return self.queries[:BATCH]

    def version_of(self, kind: IndexKind, documents: int | None = None) -> tuple[int, dict[str, float]]:
        """A published version of this kind over the first vectors, made at the first call; and the seconds it took."""
        documents = documents or len(self.vectors)
        name = f"{kind.factory}, {kind.nprobe}, {documents}"
        if name not in self.versions:
            version = len(self.versions) + 1
            self.versions[name] = version, write_version(self.store, version, self.vectors[:documents], kind)
        return self.versions[name]


# ---- exact search


def measure_exact(setting: Setting) -> None:
    """The service against the fastest raw call, over the same vectors and with as many threads."""
    version, _ = setting.version_of(IndexKind())
    for threads in setting.threads:
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
        with serving(setting.folder, threads) as service:
            calls: dict[str, Callable[[], Found]] = {
                "service": lambda: _found(service, version, setting.batch),
                **raw_calls(setting.vectors, setting.batch),
            }
            expected = calls["service"]()
            for name, call in calls.items():
                require_same(name, expected, call())
            taken = interleaved(calls, setting.rounds, [searcher_pid(service)])
            for name, own in taken.items():
                print(f"{threads} threads, {name:38s} {own.shown(taken['service'])} of the service", flush=True)


def _found(service: IndexService, version: int, queries: np.ndarray) -> Found:
    result = service.search(version, queries, K)
    return result.doc_rows, result.similarities


def raw_calls(vectors: np.ndarray, queries: np.ndarray) -> dict[str, Callable[[], Found]]:
    """What one would call instead; those named float32 hold a copy of twice the size."""
    half, wide = torch.from_numpy(vectors), torch.from_numpy(vectors).float()
    asked = torch.from_numpy(queries)
    flat, scalar = _faiss_index("Flat", vectors), _faiss_index("SQfp16", vectors)
    return {
        "torch, float16 matrix product (rounds)": lambda: torch_whole(half, asked.half()),
        **{f"torch, float16, chunks of {n}": partial(torch_chunks, half, asked, n) for n in RAW_CHUNK_ROWS},
        "FAISS, float16 (IndexScalarQuantizer)": lambda: faiss_found(scalar, queries),
        "torch, float32 copy": lambda: torch_whole(wide, asked),
        "FAISS, float32 copy (IndexFlatIP)": lambda: faiss_found(flat, queries),
    }


def _faiss_index(factory: str, vectors: np.ndarray) -> faiss.Index:
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:1].astype(np.float32))
    for start in range(0, len(vectors), BLOCK_DOCUMENTS):
        index.add(vectors[start : start + BLOCK_DOCUMENTS].astype(np.float32))
    return index


@torch.inference_mode()
def torch_whole(vectors: torch.Tensor, queries: torch.Tensor) -> Found:
    top = (queries @ vectors.T).topk(K)
    return top.indices.numpy(), top.values.float().numpy()


@torch.inference_mode()
def torch_chunks(vectors: torch.Tensor, queries: torch.Tensor, rows: int) -> Found:
    """Each chunk becomes float32, is multiplied and looked through; the chunks' best are merged at the end."""
    tops = [(queries @ chunk.float().T).topk(min(K, len(chunk))) for chunk in vectors.split(rows)]
    places = torch.cat([top.indices + number * rows for number, top in enumerate(tops)], dim=1)
    best = torch.cat([top.values for top in tops], dim=1).topk(K)
    return places.gather(1, best.indices).numpy(), best.values.numpy()


def faiss_found(index: faiss.Index, queries: np.ndarray) -> Found:
    similarities, rows = index.search(queries, K)
    return rows, similarities


def require_same(name: str, expected: Found, found: Found) -> None:
    """Stop where rows differ whose similarities are not the same but for the last bits; float16 sums may differ."""
    (rows, similarities), (other_rows, other) = expected, found
    tolerance = 2e-3 if "rounds" in name else 1e-5
    if not np.allclose(similarities, other, atol=tolerance):
        raise RuntimeError(f"{name} gives other similarities than the service")
    differ = (np.sort(rows) != np.sort(other_rows)).any(axis=1).sum()
    print(f"  {name}: {len(rows) - differ} of {len(rows)} queries get the same {K} documents as from the service")


# ---- memory


def measure_memory(setting: Setting) -> None:
    """What the searcher's process grows by when it loads a version and answers a few batches on each of its threads."""
    for name in ("flat_fp16", *setting.kinds):
        version, _ = setting.version_of(_kind(setting, name))
        with serving(setting.folder, setting.threads[0]) as service:
            pid = searcher_pid(service)
            before = memory_of(pid)
            for start in range(0, 20 * BATCH, BATCH):
                service.search(version, setting.queries[start : start + BATCH], K)
            after = memory_of(pid)
        own, mapped = (after[part] - before[part] for part in ("anonymous", "file"))
        print(
            f"{name}: anonymous {own / 1e6:.1f} MB, mapped file pages "
            f"{mapped / 1e6:.1f} MB, together {(own + mapped) / setting.vectors.nbytes:.3f} of the float16 vectors",
            flush=True,
        )


def _kind(setting: Setting, name: str, nprobe: int | None = None, over: int | None = None) -> IndexKind:
    kind = resolve_kind(name, setting.vectors.shape[1], len(setting.vectors), nprobe)
    return kind if over is None else replace(kind, overretrieve=over)


# ---- lossy kinds


def measure_kinds(setting: Setting) -> None:
    """Building, size, and recall against speed, straight on the shard; the last column is against exact search."""
    queries = setting.queries[:1000]
    torch.set_num_threads(setting.threads[0])
    faiss.omp_set_num_threads(setting.threads[0])
    exact = open_shard(setting.store, setting.store.plan(setting.version_of(IndexKind())[0]), 0, 1)
    expected = np.concatenate([exact.search(queries[i : i + BATCH], K)[0] for i in range(0, len(queries), BATCH)])
    for name in setting.kinds:
        version, seconds = setting.version_of(_kind(setting, name))
        plan = setting.store.plan(version)
        size = setting.store.shard_path(version, 0).stat().st_size
        parts = ", ".join(f"{part} {taken:.1f} s" for part, taken in seconds.items())
        print(f"{name} = {plan.kind.factory}: {parts}; {size / 1e6:.1f} MB, {size / len(setting.vectors):.1f} a vector")
        for kind in _settings_of(setting, name):
            shard = open_shard(setting.store, make_plan(version, setting.vectors, kind), 0, 1)
            found = [shard.search(queries[i : i + BATCH], K)[0] for i in range(0, len(queries), BATCH)]
            show_kind(kind, top_k_overlap(expected, np.concatenate(found)), exact, shard, setting)


def _settings_of(setting: Setting, name: str) -> Iterator[IndexKind]:
    default = _kind(setting, name)
    for nprobe in sorted({default.nprobe, *PROBES}) if default.nprobe else [None]:
        for over in OVERRETRIEVE:
            yield _kind(setting, name, nprobe, over)


def show_kind(kind: IndexKind, recall: float, exact: Shard, shard: Shard, setting: Setting) -> None:
    searches = {
        "exact": partial(exact.search, setting.batch, K),
        "lossy": partial(shard.search, setting.batch, K),
    }
    taken = interleaved(searches, max(3, setting.rounds // 2))
    print(
        f"  nprobe {kind.nprobe:4d}, {kind.overretrieve} x {K} ordered exactly: recall@{K} {recall:.3f}; "
        f"{taken['lossy'].shown(taken['exact'])} of exact search",
        flush=True,
    )


# ---- swaps


@dataclass
class Pauses:
    """Searches one after the other in a thread of their own, each with the time it began and the seconds it took."""

    service: IndexService
    queries: np.ndarray
    version: int
    taken: list[tuple[float, float]] = field(default_factory=list)
    is_done: bool = False

    def run(self) -> None:
        while not self.is_done:
            start = time.perf_counter()
            self.service.search(self.version, self.queries, K)
            self.taken.append((start, time.perf_counter() - start))

    def wait_for(self, more: int) -> None:
        """Until so many further searches are answered."""
        count = len(self.taken) + more
        while len(self.taken) < count:
            time.sleep(0.01)

    def adopt(self, version: int) -> None:
        """Name another version from now on, and wait until searches of it are answered."""
        self.version = version
        self.wait_for(3)

    def longest(self, start: float, end: float) -> float:
        """Seconds of the longest search that was under way in this span."""
        return max((s for began, s in self.taken if began < end and began + s > start), default=0.0)

    def median(self, start: float, end: float) -> float:
        return statistics.median(s for began, s in self.taken if start <= began < end)


def measure_swap(setting: Setting, swaps: int = 8) -> None:
    """How much longer a search takes than the quiet median while a version is loaded, adopted and the other freed."""
    for name in ("flat_fp16", *setting.kinds[:2]):
        version, _ = setting.version_of(_kind(setting, name))
        other = version + 1000
        copy_version(setting.store, other, version)
        for size in (BATCH, 1):
            with serving(setting.folder, 1) as service:
                service.prepare(version)
                rows = [one_swap(service, setting.queries[:size], (version, other), i) for i in range(swaps)]
            show_swaps(name, size, rows)


def one_swap(service: IndexService, queries: np.ndarray, versions: tuple[int, int], turn: int) -> dict[str, float]:
    """Milliseconds beyond the quiet median: among quiet searches, while loading, of the first ones, while freeing."""
    old, new = versions[turn % 2], versions[1 - turn % 2]
    searches = Pauses(service, queries, old)
    thread = threading.Thread(target=searches.run)
    thread.start()
    searches.wait_for(2)
    steps: dict[str, Callable[[], None]] = {
        "quiet": lambda: searches.wait_for(15),
        "prepare": lambda: service.prepare(new),
        "first": lambda: searches.adopt(new),
        "commit": lambda: service.commit(new),
        "after": lambda: searches.wait_for(2),
    }
    marks = [time.perf_counter()]
    for step in steps.values():
        step()
        marks.append(time.perf_counter())
    searches.is_done = True
    thread.join()
    median = searches.median(marks[0], marks[1])
    spans = dict(zip(steps, itertools.pairwise(marks), strict=True))
    longest = {name: 1000 * (searches.longest(*span) - median) for name, span in spans.items()}
    return longest | {
        "median": 1000 * median,
        "seconds": marks[2] - marks[1],
        "commit ms": 1000 * (marks[4] - marks[3]),
    }


def show_swaps(name: str, size: int, rows: list[dict[str, float]]) -> None:
    quiet, seconds, commit = (
        statistics.median(row[part] for row in rows) for part in ("median", "seconds", "commit ms")
    )
    print(
        f"{name}, {size} queries: quiet median {quiet:.1f} ms, prepare takes {seconds:.2f} s, commit {commit:.1f} ms; "
        f"the longest search of each of {len(rows)} swaps is longer than the quiet median by"
    )
    for part in ("quiet", "prepare", "first", "commit"):
        beyond = sorted(row[part] for row in rows)
        print(f"  {part:8s} median {statistics.median(beyond):6.1f} ms, least {beyond[0]:6.1f}, most {beyond[-1]:6.1f}")


PARTS = {
    "exact": measure_exact,
    "memory": measure_memory,
    "kinds": measure_kinds,
    "swap": measure_swap,
}


@own_ray(starts=True)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--folder", type=Path, default=None, help="where versions go (default: a temporary folder)")
    arguments = parser.parse_args()
    vectors, queries = np.load(arguments.vectors, mmap_mode="c"), np.load(arguments.queries)
    print(f"{describe_machine(max(arguments.threads))}; FAISS {faiss.__version__}; vectors {vectors.shape}")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        setting = Setting(vectors, queries, Path(folder), arguments.threads, arguments.rounds, arguments.kinds)
        for part in arguments.parts:
            print(f"-- {part}, load {os.getloadavg()[0]:.1f}", flush=True)
            PARTS[part](setting)


if __name__ == "__main__":
    main()
