"""What a batch of searches takes of one core, by index kind: rates measured on an Intel Xeon with AVX512. Pure.

docs/benchmarks.md has the measurements, `python -m benchmarks.host_search` makes them. A lossy kind reads its codes for
each query apart, so its time goes with the bytes that all queries look through; then come the candidates that are
ordered by their stored vectors, and the lists that are opened.
"""

import re

from replug.index_workers.kinds import IndexKind, bytes_per_vector, num_lists

CORE_FLOP = 6e10  # float32 products of an exact search, the reading and the top-k among them
# Bytes of codes that one core looks through in a second. In four bits, which registers look up (`x4fs`); in eight, by
# tables; numbers of 8 and 16 bits, which are decoded; float32.
FAST_SCAN, TABLES, SCALARS, FLOATS = 1.8e10, 2e9, 5e9, 1.2e10
CANDIDATE = 1.5e-6  # of a document that is ordered by its stored vector: mostly the time to reach it
LIST = 1e-6  # of a list that one query looks into


def core_seconds(kind: IndexKind, dim: int, num_documents: int, queries: int, k: int) -> float:
    """Seconds of one core for a batch of queries over vectors [num_documents, dim], k documents each.

    A kind whose codes are not known here is taken for an exact search of the documents that it probes.
    """
    lists = num_lists(kind.factory or "")
    share = kind.nprobe / lists if lists else 1.0
    rate = None if kind.factory is None else _bytes_a_second(kind.factory)
    if kind.factory is None or rate is None:
        return queries * num_documents * share * 2 * dim / CORE_FLOP
    size = bytes_per_vector(kind.factory, dim, num_documents)
    assert size is not None
    scanned = num_documents * share * size / rate
    probing = 2 * dim * lists / CORE_FLOP + kind.nprobe * LIST
    ordering = k * kind.overretrieve * CANDIDATE if kind.rerank else 0.0
    return queries * (scanned + probing + ordering)


def _bytes_a_second(factory: str) -> float | None:
    """Of codes; None where these are found by a graph or are not known."""
    if factory.startswith("HNSW"):
        return None
    rates = {r"(?:x4|RaBitQ)fs": FAST_SCAN, r"PQ\d+": TABLES, r"SQ(?:fp16|bf16|\d)": SCALARS, "Flat": FLOATS}
    return next((rate for pattern, rate in rates.items() if re.search(pattern, factory)), None)
