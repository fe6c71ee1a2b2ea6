"""Leaving out a caller's own source: what was cut from the text that is to be predicted would be a leak. Pure."""

from collections.abc import Callable, Sequence

import numpy as np

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
MORE = 8  # documents asked for beyond k at first


def search_excluding(
    search: Search,
    sources_of: Callable[[np.ndarray], list[str]],
    queries: np.ndarray,
    k: int,
    exclude: Sequence[str | None],
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and similarities [B, k] without documents of each query's excluded source.

    Asks for more until every query has k. Raises ValueError where the corpus has not so many of other sources.
    """
    wanted = k + MORE
    while True:
        rows, similarities = search(queries, wanted)
        allowed = _allowed(rows, sources_of, exclude)
        if (allowed.sum(axis=1) >= k).all():
            return _first_k(rows, allowed, k), _first_k(similarities, allowed, k)
        if rows.shape[1] < wanted:  # that was the whole corpus
            name = exclude[int(np.argmin(allowed.sum(axis=1)))]
            raise ValueError(f"the corpus has fewer than {k} documents that are not of source {name}")
        wanted *= 2


def _allowed(
    rows: np.ndarray, sources_of: Callable[[np.ndarray], list[str]], exclude: Sequence[str | None]
) -> np.ndarray:
    sources = np.array(sources_of(rows.ravel()), dtype=object).reshape(rows.shape)
    return sources != np.array(exclude, dtype=object)[:, None]


def _first_k(values: np.ndarray, allowed: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(values, order, axis=1)
