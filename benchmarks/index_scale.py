"""Measure what grows with the corpus: search, equal documents, loading, k-means, filling lists, BM25.

    python -m benchmarks.index_scale --rows 1000000 --dim 768
        [--parts search equal load kmeans fill bm25]

Vectors and texts are synthetic, made from a seed: nothing but time and memory follows from them. Each line ends with
the same for 36M documents of 768 dimensions, by bytes, by comparisons or by documents, whichever the time goes with.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import torch

from benchmarks.machine import describe_machine
from benchmarks.vector_index import BLOCK_DOCUMENTS, make_plan
from replug.index_workers.bm25 import search_bm25
from replug.index_workers.exact_search import BlockVectors, ExactShard
from replug.index_workers.faiss_index import two_level_centroids
from replug.index_workers.kinds import POINTS_PER_LIST, IndexKind, preset_lists
from replug.index_workers.searcher import open_shard
from replug.index_workers.version_store import VersionStore

ROWS, DIM = 36_000_000, 768  # of the paper's corpus and its encoder
K, BATCH, WORDS, VOCABULARY = 20, 64, 80, 200_000
CPU = torch.device("cpu")


def unit_vectors(rows: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def mapped_vectors(folder: Path, rows: int, dim: int) -> np.ndarray:
    """[rows, D] float16 in a file, a part in memory at a time."""
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float16, (rows, dim))
    for number, start in enumerate(range(0, rows, 1 << 18)):
        vectors[start : start + (1 << 18)] = unit_vectors(min(1 << 18, rows - start), dim, number)
    return vectors


def blocks_of(vectors: np.ndarray) -> BlockVectors:
    starts = range(0, len(vectors), BLOCK_DOCUMENTS)
    return BlockVectors(0, [vectors[start : start + BLOCK_DOCUMENTS] for start in starts], vectors.shape[1])


def median_seconds(call: Callable[[], object], rounds: int = 3) -> float:
    call()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def show(what: str, seconds: float, grown: float) -> None:
    digits = 0 if seconds * grown > 10 else 2
    print(f"{what}: {seconds:.2f} s; of {ROWS:,} x {DIM}: {seconds * grown:,.{digits}f} s", flush=True)


def by_bytes(vectors: np.ndarray) -> float:
    return ROWS * DIM / vectors.size


def measure_search(vectors: np.ndarray, folder: Path) -> None:
    shard, queries = ExactShard(blocks_of(vectors), CPU), unit_vectors(BATCH, vectors.shape[1], 99)
    seconds = median_seconds(lambda: shard.search(queries, K))
    show(f"exact search of {BATCH} queries, {vectors.nbytes / seconds / 1e9:.2f} GB/s", seconds, by_bytes(vectors))


def measure_equal(vectors: np.ndarray, folder: Path) -> None:
    """Documents equal to the one that every query likes best."""
    rows, dim = vectors.shape
    queries = unit_vectors(BATCH, dim, 99)
    queries += 3 * vectors[0]
    for count in (10, 1_000, rows // 10, rows):
        changed = np.array(vectors)
        changed[np.linspace(0, rows - 1, count).astype(np.int64)] = vectors[0]
        blocks = blocks_of(changed)
        shard = ExactShard(blocks, CPU)
        found = shard.search(queries, K)
        assert all(map(np.array_equal, (f[0] for f in found), scanned(queries[0], blocks)))
        seconds = median_seconds(lambda shard=shard: shard.search(queries, K), 1)
        show(f"the same, {count:,} equal documents, {BATCH} queries", seconds, by_bytes(vectors))
    one = median_seconds(lambda: scanned(queries[0], blocks), 1)
    show(f"every product in float64, {BATCH} queries", BATCH * one, by_bytes(vectors))


def scanned(query: np.ndarray, vectors: BlockVectors) -> tuple[np.ndarray, np.ndarray]:
    """The k best by every product in float64."""
    wide = query.astype(np.float64)
    products = np.concatenate([block.astype(np.float64) @ wide for block in vectors.blocks]).astype(np.float32)
    rows = np.argsort(-products, kind="stable")[:K]
    return rows, products[rows]


def measure_load(vectors: np.ndarray, folder: Path) -> None:
    store, plan = VersionStore(folder), make_plan(0, vectors, IndexKind())
    store.folder(0).mkdir(parents=True)
    start = time.perf_counter()
    for file in store.begin(plan)[0]:
        rows = plan.rows_of_file(file)
        store.write_vectors(0, file, vectors[rows.start : rows.stop])
    store.publish(plan)
    show("writing a version", time.perf_counter() - start, by_bytes(vectors))
    show(
        "loading it, checked, from the page cache",
        median_seconds(lambda: open_shard(store, plan, 0, 1)),
        by_bytes(vectors),
    )


def measure_kmeans(vectors: np.ndarray, folder: Path) -> None:
    """k-means of all lists at once, which FAISS does, and in two levels."""
    lists = preset_lists(ROWS)
    for count in (2_048, 8_192):
        sample = np.array(vectors[: POINTS_PER_LIST * count], dtype=np.float32)
        at_once = faiss.Kmeans(sample.shape[1], count, niter=1, spherical=True)
        one = median_seconds(lambda at_once=at_once, sample=sample: at_once.train(sample), 1)
        grown = (lists / count) ** 2 * DIM / sample.shape[1]
        show(f"k-means of {count:,} lists at once, ten times one iteration; {lists:,} lists", 10 * one, grown)
        start = time.perf_counter()
        two_level_centroids(sample, count, 10, spherical=True)
        grown = (lists / count) ** 1.5 * DIM / sample.shape[1]
        show(f"k-means of {count:,} lists in two levels; {lists:,} lists", time.perf_counter() - start, grown)


def measure_fill(vectors: np.ndarray, folder: Path) -> None:
    """Which list a vector goes to, by all centroids and by a graph of them."""
    lists, dim = preset_lists(ROWS), vectors.shape[1]
    centroids, some = unit_vectors(lists, dim, 7), np.array(vectors[:20_000], dtype=np.float32)
    for name, quantizer in (("all", faiss.IndexFlatIP(dim)), ("a graph", faiss.IndexHNSWFlat(dim, 32, 0))):
        quantizer.add(centroids)
        seconds = median_seconds(lambda quantizer=quantizer: quantizer.search(some, 1), 1)
        show(f"lists of {len(some):,} vectors by {name} of {lists:,} centroids", seconds, ROWS / len(some) * DIM / dim)


def texts(count: int) -> Iterator[str]:
    """Words as often as in a language."""
    rng = np.random.default_rng(0)
    for _ in range(0, count, 1_000):
        words = np.minimum(rng.zipf(1.2, (1_000, WORDS)), VOCABULARY)
        yield from (" ".join(f"w{number}" for number in row) for row in words.tolist())


def measure_bm25(vectors: np.ndarray, folder: Path) -> None:
    """In processes of their own, whose peaks are read."""
    for kind, count in itertools.product(("ours", "bm25s"), (50_000, 100_000, min(len(vectors), 1_000_000))):
        if kind == "ours" or count <= 100_000:
            command = [sys.executable, "-m", "benchmarks.index_scale", "--bm25", kind, "--rows", str(count)]
            subprocess.run(command, check=True)


def peak_bytes() -> int:
    """The most memory this process has held."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])


def run_bm25(kind: str, count: int) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak, which was the parent's
    before, start = peak_bytes(), time.process_time()
    queries = list(itertools.islice(texts(1_000), 0, 1_000, 10))
    if kind == "ours":
        search_bm25(lambda: texts(count), queries, K)
    else:
        import bm25s

        index = bm25s.BM25(method="lucene")
        index.index(bm25s.tokenize(list(texts(count)), show_progress=False), show_progress=False)
        for query in queries:
            words = bm25s.tokenize(query, return_ids=False, show_progress=False)[0]
            index.get_scores_from_ids(index.get_tokens_ids(words))
    peak = peak_bytes() - before
    what = f"BM25 ({kind}) of {count:,} documents, peak {peak / 2**20:,.0f} MiB, {peak / count:,.0f} bytes a document"
    show(f"{what}, of one core", time.process_time() - start, ROWS / count)


PARTS = {
    "search": measure_search,
    "equal": measure_equal,
    "load": measure_load,
    "kmeans": measure_kmeans,
    "fill": measure_fill,
    "bm25": measure_bm25,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the vectors go (default: a temporary folder)")
    parser.add_argument("--bm25", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bm25:
        run_bm25(arguments.bm25, arguments.rows)
        return
    torch.set_num_threads(arguments.threads)
    faiss.omp_set_num_threads(arguments.threads)
    print(f"{describe_machine(arguments.threads)}; {arguments.rows:,} x {arguments.dim}", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        vectors = mapped_vectors(Path(folder), arguments.rows, arguments.dim)
        for part in arguments.parts:
            print(f"-- {part}, load {os.getloadavg()[0]:.1f}", flush=True)
            PARTS[part](vectors, Path(folder))


if __name__ == "__main__":
    main()
