"""Index kinds: the presets, their FAISS factory strings, and the bytes of a vector. Pure.

`flat_fp16` is ours: exact, over float16 vectors. Everything else is a FAISS `index_factory` string; the float16 vectors
stay on disk beside the index and order its candidates. To add a preset: its line in `PRESETS`, and its name in the
description of `index.kind` in replug/config/schema.py.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

EXACT = "flat_fp16"

# k-means wants this many points for each centroid; FAISS warns below.
POINTS_PER_LIST = 39
LEAST_CENTROIDS = 256  # a training sample suffices for at least this number
MOST_LISTS_AT_ONCE = 4_096  # of one k-means, with time in lists x points; more are trained in two levels


# Preset -> factory string, by `dim` and, for inverted files, number of `lists`. Product quantizers have four bits for
# each sub-vector, looked up in registers: four dimensions each for little memory, two for speed.
PRESETS: dict[str, Callable[[int, int], str]] = {
    "sq8": lambda dim, lists: "SQ8",
    "pq": lambda dim, lists: f"PQ{dim // 4}x4fs",
    "ivf_sq8": lambda dim, lists: f"IVF{lists},SQ8",
    "ivf_pq": lambda dim, lists: f"IVF{lists},PQ{dim // 2}x4fs",
}
EXPECTED = f"{', '.join((EXACT, *PRESETS))} or a FAISS index_factory string"
SEARCH_BYTES = 512 << 20  # of a GPU, beside the vectors: an exact search takes half of it
FAST_SCAN_BLOCK = 32  # vectors that the last block of each list is filled up to


@dataclass(frozen=True)
class IndexKind:
    """How an index is built and searched. `factory` None is exact search over the float16 vectors.

    With `store`, the URL of a vector store, nothing is built: searches go to the store.
    """

    factory: str | None = None
    nprobe: int = 0  # lists that a search probes; 0 without lists
    overretrieve: int = 1  # candidates for each requested document, ordered by the stored float16 vectors
    store: str | None = None

    @property
    def is_exact(self) -> bool:
        return self.factory is None


def resolve_kind(name: str, dim: int, num_documents: int, nprobe: int | None) -> IndexKind:
    """Return the kind that a configuration names, for vectors [num_documents, dim].

    By default a search probes a 32nd of the lists, at least eight: recall@20 is 0.95 on a million real vectors
    (docs/benchmarks.md).
    """
    if name == EXACT:
        return IndexKind()
    factory = PRESETS[name](dim, preset_lists(num_documents)) if name in PRESETS else name
    lists = num_lists(factory)
    probes = min(nprobe or max(8, lists // 32), lists)
    return IndexKind(factory, probes, default_overretrieve(factory, num_documents))


def preset_lists(num_documents: int) -> int:
    """Return the lists of an IVF preset: a power of two near 8 sqrt(n), fewer if points to train them are missing."""
    most = min(8 * num_documents**0.5, num_documents / POINTS_PER_LIST)
    return 1 << max(0, int(most).bit_length() - 1)


def num_lists(factory: str) -> int:
    """Return lists of an inverted file; 0 for a kind without."""
    lists = re.search(r"IVF(\d+)", factory)
    return int(lists.group(1)) if lists else 0


def num_centroids(factory: str) -> int:
    """Return the most centroids that one k-means of a kind has; 1 for a kind without."""
    bits = [int(number or 8) for number in re.findall(r"PQ\d+(?:x(\d+))?", factory)]
    return max([1, num_lists(factory), *(2**b for b in bits)])


def default_overretrieve(factory: str, num_documents: int) -> int:
    """Return candidates for each document: more for coarser codes, except with lists, where unprobed lists lose more.

    For coarse codes without lists they grow with the square root of the millions of documents (docs/scale.md).
    """
    if not re.search(r"PQ|RaBitQ", factory):
        return 4
    return 8 if num_lists(factory) else 16 * max(1, math.isqrt(num_documents // 1_000_000))


def training_rows(factory: str, num_documents: int) -> np.ndarray:
    """Return rows of the sample that quantizers are trained on: evenly spread, the same every time.

    Twice the points that k-means wants, or only the points it wants for very many lists: memory holds them all.
    """
    centroids = max(num_centroids(factory), LEAST_CENTROIDS)
    points = POINTS_PER_LIST * max(min(2 * centroids, 2 * MOST_LISTS_AT_ONCE), centroids)
    return np.linspace(0, num_documents - 1, min(num_documents, points)).round().astype(np.int64)


def bytes_per_vector(factory: str, dim: int, num_documents: int) -> float | None:
    """Return the bytes of codes, ids of lists and links of a graph, as FAISS stores them; None for an unknown kind."""
    codes, lists = _code_bytes(factory, dim), num_lists(factory)
    if codes is None:
        return None
    graph = re.match(r"HNSW(\d+)", factory)  # elsewhere it is of the lists alone
    extra = (8.0 if lists else 0.0) + (8.0 * int(graph.group(1)) + 16 if graph else 0.0)
    filled = 1 + FAST_SCAN_BLOCK / 2 * lists / num_documents if factory.endswith("fs") else 1.0
    return filled * (codes + extra)


def _code_bytes(factory: str, dim: int) -> float | None:
    if codes := re.search(r"PQ(\d+)(?:x(\d+))?", factory):
        return int(codes.group(1)) * int(codes.group(2) or 8) / 8
    if scalar := re.search(r"SQ(fp16|bf16|\d+)", factory):
        return dim * (16 if "16" in scalar.group(1) else int(scalar.group(1))) / 8
    if "RaBitQ" in factory:
        return dim / 8 + 8
    return 4.0 * dim if "Flat" in factory or factory.startswith("HNSW") else None
