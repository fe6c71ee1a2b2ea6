"""From a configuration to an index: what is built of which weights and documents, and how it is searched."""

import os
import tempfile
from pathlib import Path

from replug.cluster.layout import index_actors
from replug.config.choices import Rerank
from replug.config.schema import Config
from replug.data.store import Corpus, PreparedSet
from replug.index_workers.answers import MORE
from replug.index_workers.build_plan import BuildPlan, IndexState
from replug.index_workers.faiss_index import check_kind
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.index_workers.service import IndexService
from replug.index_workers.store_shard import require_store_of
from replug.index_workers.version_store import VersionStore, weights_sha256
from replug.models.batching import ENCODER_TOKENS
from replug.models.encoder import Encoder
from replug.models.hardware import dtype_name

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
    return config.retrieve.k + (MORE if config.retrieve.exclude_own_source else 0)


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
