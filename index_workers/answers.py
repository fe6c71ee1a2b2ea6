"""Search results: merge them, exclude a source, compare them before and after a refresh. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


def merge_top_k(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge every shard's rows and similarities [B, <=k] into rows [B, k] and similarities [B, k], best first.

    Equal similarities come in the order of their rows.
    """
    rows = np.concatenate([rows for rows, _ in parts], axis=1)
    similarities = np.concatenate([similarities for _, similarities in parts], axis=1)
    order = np.lexsort((rows, -similarities), axis=1)[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(similarities, order, axis=1)


Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
MORE = 8  # documents requested beyond k at first


def search_excluding(
    search: Search,
    sources_of: Callable[[np.ndarray], list[str]],
    queries: np.ndarray,
    k: int,
    exclude: Sequence[str | None],
    at_least: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and similarities [B, k] without documents of each query's excluded source.

    Requests more until every query has k. If the corpus has fewer documents of other sources, the result has fewer
    columns. Raises ValueError if it would have fewer than `at_least`.
    """
    wanted = k + MORE
    while True:
        rows, similarities = search(queries, wanted)
        sources = np.array(sources_of(rows.ravel()), dtype=object).reshape(rows.shape)
        allowed = sources != np.array(exclude, dtype=object)[:, None]
        if (allowed.sum(axis=1) >= k).all():
            return _first_k(rows, allowed, k), _first_k(similarities, allowed, k)
        if rows.shape[1] < wanted:  # that was the whole corpus
            counts = allowed.sum(axis=1)
            if counts.min() < at_least:
                name = exclude[int(np.argmin(counts))]
                raise ValueError(f"the corpus has fewer than {at_least} documents that are not of source {name}")
            k = int(counts.min())
        else:
            wanted *= 2


def _first_k(values: np.ndarray, allowed: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(values, order, axis=1)


@dataclass(frozen=True, slots=True)
class Measures:
    """All between 0 and 1, except `drift`, 1 - cosine, up to 2. The defaults are for a first version."""

    recall: float = 1.0
    overlap: float = 1.0
    drift: float = 0.0


def top_k_overlap(rows: np.ndarray, others: np.ndarray) -> float:
    """Return the mean share of each query's documents [B, K] that are also in `others` [B, K]."""
    shares = [len(np.intersect1d(a, b)) / len(a) for a, b in zip(rows, others, strict=True)]
    return float(np.mean(shares))


def mean_drift(vectors: np.ndarray, others: np.ndarray) -> float:
    """Return 1 - mean cosine between the two vectors [N, D] of each document."""
    a, b = vectors.astype(np.float64), others.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(1 - np.mean((a * b).sum(axis=1) / np.maximum(norms, 1e-12)))


def sample_rows(num_documents: int, at_most: int = 4096) -> np.ndarray:
    """Return rows of the documents for measuring drift: evenly spread, the same at every refresh."""
    return np.unique(np.linspace(0, num_documents - 1, min(num_documents, at_most)).round().astype(np.int64))
