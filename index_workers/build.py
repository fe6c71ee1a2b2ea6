"""From a configuration to an index: what is built of which weights and documents, and how it is searched.

`LiveReranker` orders what the index finds by the live encoder: the index's own vectors are as old as the last refresh,
and a lossy kind's are coarse besides.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from replug.cluster.layout import index_actors
from replug.config.choices import Rerank
from replug.config.schema import Config
from replug.data.records import SearchResult
from replug.data.store import Corpus, CorpusStore, PreparedSet
from replug.index_workers.answers import MORE
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.faiss_index import check_kind
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.index_workers.service import IndexService
from replug.index_workers.store_shard import require_store_of
from replug.index_workers.vectors import order_exactly
from replug.index_workers.version_store import VersionStore, weights_sha256
from replug.models.batching import ENCODER_TOKENS
from replug.models.encoder import Encoder
from replug.models.hardware import dtype_name

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


WATCHED_TEXTS = 64  # by which every refresh is measured: recall, overlap


def watched_texts(data: PreparedSet) -> list[str]:
    """Return the first training texts' queries, which measure every refresh."""
    return [example.query for example in data.queries.examples(range(min(WATCHED_TEXTS, len(data.queries))))]


def index_kind(config: Config, dim: int, num_documents: int) -> IndexKind:
    """Return what is built and how it is searched. Raises UserError if FAISS cannot build it of so many vectors.

    Or not search it on the GPU that `index.gpus_per_searcher` gives.
    """
    index = config.index
    stored = index.rerank is Rerank.stored
    kind = resolve_kind(index.kind, dim, num_documents, index.nprobe, stored)
    check_kind(kind, dim, num_documents, _documents_asked_for(config) if index.gpus_per_searcher else None)
    return kind


def _documents_asked_for(config: Config) -> int:
    """Return the documents that one search of the index asks for."""
    live = config.index.rerank is Rerank.live
    k = config.retrieve.k * (LIVE_OVERRETRIEVE if live else 1)
    return k + (MORE if config.retrieve.exclude_own_source else 0)


def publish_snapshot(
    config: Config, encoder: Encoder, data: Corpus, store: VersionStore, index: IndexState
) -> BuildPlan:
    """Write the weights as they are as a version's snapshot, and say what is to be built of them."""
    return build_plan(config, encoder, data, store, index, store.save_snapshot(index.version, encoder.save))


def build_plan(
    config: Config, encoder: Encoder, data: Corpus, store: VersionStore, index: IndexState, weights_sha256: str
) -> BuildPlan:
    require_store_of(data.corpus, encoder)
    kind = IndexKind(store=data.corpus.url) if data.corpus.url else index_kind(config, encoder.dim, len(data.corpus))
    return BuildPlan(
        version=index.version,
        step=index.step,
        weights_sha256=weights_sha256,
        corpus_path=str(data.corpus_path.absolute()),
        corpus_relative=os.path.relpath(data.corpus_path.absolute(), store.root.absolute()),
        corpus_sha256=data.corpus_sha256,
        num_documents=len(data.corpus),
        block_documents=config.index.block_documents,
        similarity=encoder.similarity,
        max_tokens=encoder.max_tokens,
        dim=encoder.dim,
        modules=encoder.pooling,
        query_prompt=encoder.prompt("query"),
        document_prompt=encoder.prompt("document"),
        dims=encoder.dims,
        dtype=dtype_name(config.index.dtype.value),
        tokens_per_batch=config.index.tokens_per_batch
        or ENCODER_TOKENS["cuda" if config.index.gpus_per_builder else "cpu"],
        kind=kind,
        # Any number of searchers share exact vectors.
        num_shards=1 if kind.is_exact else index_actors(config.index).num_shards,
        quantizer_from=store.latest_quantizer(kind.factory, index.version),
    )


def require_same_index(config: Config, encoder: Encoder, data: Corpus, store: VersionStore) -> None:
    """Raise UserError where version 0 of an index is of another corpus or encoder, before anything is overwritten."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        digest = weights_sha256(Path(folder))
    store.require_same_vectors(build_plan(config, encoder, data, store, IndexState(0, 0), digest))


def build_version(config: Config, encoder: Encoder, data: Corpus, index: IndexService, at: IndexState) -> None:
    """Embed, publish and load a version now, or what of it is not there yet."""
    index.build(publish_snapshot(config, encoder, data, index.store, at)).result()
    index.prepare(at.version)


def document_search(config: Config, encoder: Encoder, data: PreparedSet, index: IndexService) -> Search:
    """Return the index's answer, or the live encoder's order of it."""
    if config.index.rerank is not Rerank.live:
        return index.search
    return LiveReranker(index.search, encoder.encode_document, data.corpus, LIVE_OVERRETRIEVE)
