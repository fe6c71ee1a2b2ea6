"""The candidates of a split's texts, found by an index of the retriever as it is, by BM25 and by chance.

Queries that were tuned earlier search the same index.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.records import Window
from replug.data.store import CorpusStore, PreparedSet, WindowStore
from replug.index_workers.bm25 import search_bm25
from replug.index_workers.service import IndexService
from replug.index_workers.vectors import BlockVectors
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder, require_finite_vectors
from replug.train.labels.candidates import (
    Allowed,
    Candidates,
    Found,
    TooFewFound,
    Wanted,
    any_document,
    mix_candidates,
    other_sources,
)

TEXTS_PER_SEARCH = 256


@dataclass(frozen=True, slots=True)
class Finder:
    """Index version 0 holds the documents by `encoder`, which encodes the texts as well; so may `tuned`."""

    config: Config
    data: PreparedSet
    index: IndexService
    encoder: Encoder
    tuned: Encoder | None = None

    def find(self, store: WindowStore) -> tuple[Candidates, np.ndarray]:
        """The candidates of all texts and their similarities [N, K] float32."""
        windows = store.windows()
        vectors = self._query_vectors(windows, self.encoder)
        candidates = self._candidates(windows, vectors)
        return candidates, similarities(vectors, candidates.doc_rows, open_block_vectors(self.index.store))

    def _query_vectors(self, windows: list[Window], encoder: Encoder) -> np.ndarray:
        """[N, D], some texts at a time, by their places in the set."""
        starts = range(0, len(windows), TEXTS_PER_SEARCH)
        return np.concatenate([self._encode(windows[at : at + TEXTS_PER_SEARCH], encoder) for at in starts])

    def _encode(self, windows: list[Window], encoder: Encoder) -> np.ndarray:
        vectors = encoder.encode_query([window.context for window in windows]).numpy()
        require_finite_vectors(vectors, [window.id for window in windows])
        return vectors

    def _candidates(self, windows: list[Window], vectors: np.ndarray) -> Candidates:
        label, corpus = self.config.label, self.data.corpus
        wanted = Wanted(label.dense, label.bm25, label.random, label.tuned)
        if len(corpus) < wanted.total:
            raise UserError(f"label: {wanted.total} candidates of a text are wanted, but the corpus has {len(corpus)}")
        allowed: Allowed = any_document
        if self.config.retrieve.exclude_own_source:
            allowed = other_sources(corpus.sources, [window.source for window in windows])
        dense = self._nearest(windows, vectors, label.dense)
        tuned = self._tuned(windows)
        depth = wanted.total - wanted.random
        while True:
            found = Found(dense, self._bm25(windows, min(depth, len(corpus))), tuned)
            try:
                return mix_candidates(wanted, found, len(corpus), self.config.seed, allowed)
            except TooFewFound as error:
                if depth >= len(corpus):
                    raise UserError(f"label.bm25: {error}; expected a larger corpus, or fewer") from error
                depth *= 2

    def _tuned(self, windows: list[Window]) -> np.ndarray:
        """As many as are new for each text, whichever the untuned queries found."""
        label = self.config.label
        if self.tuned is None:
            return np.empty((len(windows), 0), np.int64)
        return self._nearest(windows, self._query_vectors(windows, self.tuned), label.dense + label.tuned)

    def _nearest(self, windows: list[Window], vectors: np.ndarray, k: int) -> np.ndarray:
        if not k:
            return np.empty((len(windows), 0), np.int64)
        starts = range(0, len(windows), TEXTS_PER_SEARCH)
        return np.concatenate([self._search(windows, vectors, slice(at, at + TEXTS_PER_SEARCH), k) for at in starts])

    def _search(self, windows: list[Window], vectors: np.ndarray, some: slice, k: int) -> np.ndarray:
        own = self.config.retrieve.exclude_own_source
        exclude = [window.source for window in windows[some]] if own else None
        return self.index.search(0, vectors[some], k, exclude).doc_rows

    def _bm25(self, windows: list[Window], depth: int) -> np.ndarray:
        if not self.config.label.bm25:
            return np.empty((len(windows), 0), np.int64)
        return search_bm25(partial(_texts, self.data.corpus), [window.context for window in windows], depth)[0]


def open_block_vectors(store: VersionStore, version: int = 0) -> BlockVectors:
    """The stored vectors of a whole version, mapped."""
    plan = store.plan(version)
    return BlockVectors(0, store.open_vectors(plan, range(plan.num_files)), plan.dim)


def similarities(queries: np.ndarray, doc_rows: np.ndarray, vectors: BlockVectors) -> np.ndarray:
    """Inner products [N, K] float32 of query vectors [N, D] and the stored ones of their documents."""
    parts = []
    for start in range(0, len(queries), TEXTS_PER_SEARCH):
        some = slice(start, start + TEXTS_PER_SEARCH)
        documents = vectors.take(doc_rows[some]).astype(np.float64)
        parts.append(np.einsum("bd,bkd->bk", queries[some].astype(np.float64), documents))
    return np.concatenate(parts).astype(np.float32)


def _texts(corpus: CorpusStore) -> Iterator[str]:
    return (document.text for document in corpus.iterate())
