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
    at_least: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and similarities [B, k] without documents of each query's excluded source.

    Asks for more until every query has k. Where the corpus has not so many of other sources there are fewer
    columns, and ValueError is raised where they would be fewer than `at_least`.
    """
    wanted = k + MORE
    while True:
        rows, similarities = search(queries, wanted)
        allowed = _allowed(rows, sources_of, exclude)
        if (allowed.sum(axis=1) >= k).all():
            return _first_k(rows, allowed, k), _first_k(similarities, allowed, k)
        if rows.shape[1] < wanted:  # that was the whole corpus
            k = _what_there_is(allowed, exclude, at_least)
        else:
            wanted *= 2


def _what_there_is(allowed: np.ndarray, exclude: Sequence[str | None], at_least: int) -> int:
    counts = allowed.sum(axis=1)
    if counts.min() < at_least:
        name = exclude[int(np.argmin(counts))]
        raise ValueError(f"the corpus has fewer than {at_least} documents that are not of source {name}")
    return int(counts.min())


def _allowed(
    rows: np.ndarray, sources_of: Callable[[np.ndarray], list[str]], exclude: Sequence[str | None]
) -> np.ndarray:
    sources = np.array(sources_of(rows.ravel()), dtype=object).reshape(rows.shape)
    return sources != np.array(exclude, dtype=object)[:, None]


def _first_k(values: np.ndarray, allowed: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(values, order, axis=1)
