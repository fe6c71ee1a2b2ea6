"""What a batch of searches takes of one core, by index kind: rates measured on an Intel Xeon with AVX512. Pure.

docs/benchmarks.md has the measurements, `python -m benchmarks.host_search` makes them. A lossy kind reads its codes for
each query apart, so its time goes with the bytes that all queries look through. Before that the lists are found, by
FAISS's own product with all centroids; then the candidates are ordered by their stored vectors.
"""

import re

from replug.index_workers.kinds import IndexKind, bytes_per_vector, num_lists

CORE_FLOP = 7e10  # float32 products of an exact search, the reading and the top-k among them
CENTROID_FLOP = 8.7e9  # products with all centroids, the choice of the nearest among them
GRAPH = 0.1  # of that, where a graph finds the lists (`IVF32768_HNSW32,...`)
# Bytes of codes that one core looks through in a second: four bits that registers look up (`x4fs`); bits that are
# estimated from; eight bits, by tables; numbers of 8 and 16 bits, which are decoded; float32.
RATES = {
    r"x4fs": 2.3e10,
    r"RaBitQ": 4e9,
    r"PQ\d+": 2.6e9,
    r"SQ(?:fp16|bf16|\d)": 5e9,
    r"Flat": 1.2e10,
}
CANDIDATE, CANDIDATE_NUMBER = 6e-7, 1.7e-9  # of a document that is ordered by its stored vector, and of each number
LIST = 5e-7  # of a list that one query looks into


def core_seconds(kind: IndexKind, dim: int, num_documents: int, queries: int, k: int, parts: int = 1) -> float:
    """Seconds of one core for a batch of queries over one of the parts of vectors [num_documents, dim], k each.

    Each part finds the lists and orders candidates of its own, so a lossy kind in parts is more work.
    A kind whose codes are not known here is taken for an exact search of the documents that it probes.
    """
    lists = num_lists(kind.factory or "")
    share = kind.nprobe / lists if lists else 1.0
    rate = None if kind.factory is None else _bytes_a_second(kind.factory)
    if kind.factory is None or rate is None:
        return queries * num_documents / parts * share * 2 * dim / CORE_FLOP
    size = bytes_per_vector(kind.factory, dim, num_documents)
    assert size is not None
    scanned = num_documents / parts * share * size / rate
    finding = 2 * dim * lists / CENTROID_FLOP * (GRAPH if "_HNSW" in kind.factory else 1)
    ordering = k * kind.overretrieve * (CANDIDATE + dim * CANDIDATE_NUMBER) if kind.rerank else 0.0
    return queries * (finding + kind.nprobe * LIST + scanned + ordering)


def _bytes_a_second(factory: str) -> float | None:
    """Of codes; None where these are found by a graph or are not known."""
    if factory.startswith("HNSW"):
        return None
    return next((rate for pattern, rate in RATES.items() if re.search(pattern, factory)), None)
