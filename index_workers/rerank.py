"""The live encoder's order of what the index finds.

The index's own vectors are as old as the last refresh, and a lossy kind's are coarse besides.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from replug.data.records import SearchResult
from replug.data.store import CorpusStore
from replug.index_workers.vectors import order_exactly

LIVE_OVERRETRIEVE = 4  # candidates that are embedded for each document asked for, where nobody says otherwise


class Search(Protocol):
    """The k nearest documents to query vectors [B, D] in one version, none of a query's excluded source.

    At least `at_least` (default: k) where the corpus has no more of other sources.
    """

    def __call__(
        self,
        version: int,
        queries: np.ndarray,
        k: int,
        exclude: Sequence[str | None] | None = None,
        at_least: int | None = None,
    ) -> SearchResult: ...


class LiveReranker:
    """Asks the index for `overretrieve` times as many documents and embeds them now."""

    def __init__(
        self, search: Search, encode: Callable[[Sequence[str]], Tensor], corpus: CorpusStore, overretrieve: int
    ) -> None:
        self._search, self._encode, self._corpus, self._over = search, encode, corpus, overretrieve

    def __call__(
        self,
        version: int,
        queries: np.ndarray,
        k: int,
        exclude: Sequence[str | None] | None = None,
        at_least: int | None = None,
    ) -> SearchResult:
        found = self._search(version, queries, min(k * self._over, len(self._corpus)), exclude, at_least or k)
        rows, places = np.unique(found.doc_rows, return_inverse=True)  # a document is embedded once
        vectors = self._encode(self._corpus.texts(rows)).numpy()
        candidates = vectors[places.reshape(found.doc_rows.shape)]
        return SearchResult(*order_exactly(queries, found.doc_rows, candidates, k), found.index_version)
