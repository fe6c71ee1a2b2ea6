"""Searching on processors at 1M and 10M vectors: recall, processor time, memory, building, one shard and several.

    python -m benchmarks.host_search --vectors grown.npy --queries queries.npy --rows 1000000 10000000 --folder FOLDER
        [--kinds pq ivf_pq] [--probes 64 128] [--over 4 8 16] [--shards 1 4]

The vectors are those of `benchmarks.grown_vectors`, of which the first `--rows` are taken. Recall@20 is against exact
search. Times are of the processor, one thread, a batch of 64 queries: other programs hardly change them. A lossy kind's
candidates are ordered by the stored vectors.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import faiss
import numpy as np
import torch

from benchmarks.grown_vectors import BLOCK, CPU, blocks_of
from benchmarks.machine import describe_machine
from benchmarks.vector_index import memory_of
from replug.index_workers import faiss_index
from replug.index_workers.exact_search import ExactShard, merge_top_k, top_k_overlap
from replug.index_workers.faiss_index import FaissShard
from replug.index_workers.kinds import IndexKind, resolve_kind, training_rows
from replug.index_workers.searcher import Shard

K, BATCH = 20, 64


@dataclass(frozen=True)
class Setting:
    """`vectors` [N, D] float16, mapped; `queries` [M, D] float32; `folder` keeps indexes and exact answers."""

    vectors: np.ndarray
    queries: np.ndarray
    folder: Path

    def first(self, rows: int) -> "Setting":
        return replace(self, vectors=self.vectors[:rows])

    def kind(self, name: str, nprobe: int | None = None, over: int | None = None) -> IndexKind:
        rows, dim = self.vectors.shape
        kind = resolve_kind(name, dim, rows, nprobe)
        return kind if over is None else replace(kind, overretrieve=over)

    def batches(self) -> Iterator[np.ndarray]:
        return (self.queries[start : start + BATCH] for start in range(0, len(self.queries), BATCH))


def seconds_of(call: Callable[[], object]) -> float:
    """Of the processor."""
    start = time.process_time()
    call()
    return time.process_time() - start


def anonymous_bytes() -> int:
    return memory_of(os.getpid())["anonymous"]


def answers(shards: list[Shard], setting: Setting) -> tuple[np.ndarray, list[float]]:
    """Rows [M, K] merged from all shards; seconds of each batch, of all shards together."""
    rows, seconds = [], []
    for batch in setting.batches():
        start = time.process_time()
        rows.append(merge_top_k([shard.search(batch, K) for shard in shards], K)[0])
        seconds.append(time.process_time() - start)
    return np.concatenate(rows), seconds


def exact_answers(setting: Setting) -> np.ndarray:
    """Computed once for so many vectors."""
    path = setting.folder / f"exact-{len(setting.vectors)}.npy"
    if not path.exists():
        found, seconds = answers([ExactShard(blocks_of(setting.vectors), CPU)], setting)
        print(f"flat_fp16, {len(setting.vectors):,}: {statistics.median(seconds):.3f} s a batch", flush=True)
        np.save(path, found)
    return np.load(path)


def trained(setting: Setting, kind: IndexKind) -> Path:
    """The empty index, trained once for so many vectors."""
    assert kind.factory is not None
    rows = len(setting.vectors)
    quantizer = setting.folder / f"{kind.factory.replace(',', '-')}-{rows}.quantizer"
    if not quantizer.exists():
        sample = np.array(setting.vectors[training_rows(kind.factory, rows)])
        seconds = seconds_of(lambda: faiss_index.train_quantizer(kind, sample, quantizer))
        print(f"{kind.factory}, {rows:,}: {seconds:.0f} s to train on {len(sample):,}", flush=True)
    return quantizer


def filled(setting: Setting, kind: IndexKind, shards: int) -> list[Path]:
    """Files of the shards, of one quantizer; those that are there are taken."""
    assert kind.factory is not None
    rows, quantizer = len(setting.vectors), trained(setting, kind)
    parts = [quantizer.with_suffix(f".{number}-{shards}") for number in range(shards)]
    for number, part in enumerate(parts):
        if not part.exists():
            blocks = blocks_of(setting.vectors, rows_of(number, shards, rows)).blocks
            seconds = seconds_of(lambda blocks=blocks, part=part: faiss_index.fill(quantizer, blocks, part))
            print(f"{kind.factory}, shard {number} of {shards}: {seconds:.0f} s to add", flush=True)
    return parts


def rows_of(number: int, shards: int, rows: int) -> range:
    """Whole blocks, as a run's shards have."""
    blocks = -(-rows // BLOCK)
    start, stop = (min(rows, BLOCK * (blocks * n // shards)) for n in (number, number + 1))
    return range(start, stop)


def measure(setting: Setting, name: str, probes: list[int | None], overs: list[int], shards: int) -> None:
    """Recall and processor time of a kind over so many shards."""
    expected, rows = exact_answers(setting), len(setting.vectors)
    files = filled(setting, setting.kind(name), shards)
    before = anonymous_bytes()
    opened = [
        FaissShard(file, setting.kind(name), blocks_of(setting.vectors, part))
        for number, file in enumerate(files)
        for part in [rows_of(number, shards, rows)]
    ]
    size = sum(file.stat().st_size for file in files)
    print(f"{name} in {shards}, {rows:,}: files {size / 1e6:,.0f} MB, memory {(anonymous_bytes() - before) / 1e6:,.0f}")
    for kind in (setting.kind(name, nprobe, over) for nprobe in probes for over in overs):
        for shard in opened:
            shard._kind = kind
        found, seconds = answers(list(opened), setting)
        print(
            f"{kind.factory} in {shards}, {rows:,}: nprobe {kind.nprobe}, {kind.overretrieve} candidates: "
            f"recall@{K} {top_k_overlap(expected, found):.3f}, {1000 * statistics.median(seconds):,.0f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--kinds", nargs="*", default=["pq", "ivf_pq"])
    parser.add_argument("--probes", type=int, nargs="*", default=[None], help="default: the kind's own")
    parser.add_argument("--over", type=int, nargs="*", default=[None], help="default: the kind's own")
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--most-queries", type=int, default=512)
    parser.add_argument("--folder", type=Path, required=True, help="keeps exact answers and filled indexes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    print(f"{describe_machine(1)}; FAISS {faiss.__version__}", flush=True)
    queries = np.load(arguments.queries)[: arguments.most_queries]
    whole = Setting(np.load(arguments.vectors, mmap_mode="c"), queries, arguments.folder)
    for rows in arguments.rows:
        setting = whole.first(rows)
        exact_answers(setting)
        for name in arguments.kinds:
            for shards in arguments.shards:
                measure(setting, name, arguments.probes, arguments.over, shards)


if __name__ == "__main__":
    main()
