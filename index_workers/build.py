"""Turn a configuration into an index: its kind, its plan, its weights and documents."""

import logging
import os
import tempfile
from pathlib import Path

import numpy as np

from replug.cluster.places import index_actors
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.store import Corpus, CorpusStore, PreparedSet, StoredCorpus, comparable
from replug.index_workers.build_plan import BLOCK_DOCUMENTS, BuildPlan, IndexState
from replug.index_workers.faiss_index import check_kind
from replug.index_workers.kinds import IndexKind, resolve_kind
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import VersionStore, weights_sha256
from replug.models.batching import ENCODER_TOKENS
from replug.models.encoder import Encoder
from replug.models.hardware import dtype_name

log = logging.getLogger(__name__)

SAME_ENCODER, ANOTHER_ENCODER = 0.95, 0.5  # mean cosine of stored vectors and the encoder's
WATCHED_TEXTS = 64  # they measure recall and overlap of every refresh


def watched_texts(data: PreparedSet) -> list[str]:
    """Return the first training texts' queries, which measure every refresh."""
    return [example.query for example in data.queries.examples(range(min(WATCHED_TEXTS, len(data.queries))))]


def index_kind(config: Config, dim: int, num_documents: int) -> IndexKind:
    """Return the kind of the index. Raises UserError if FAISS cannot build it or the corpus is too small."""
    kind = resolve_kind(config.index.kind, dim, num_documents, config.index.nprobe)
    check_kind(kind, dim, num_documents)
    return kind


def publish_snapshot(
    config: Config, encoder: Encoder, data: Corpus, store: VersionStore, index: IndexState
) -> BuildPlan:
    """Write the current weights as a version's snapshot, and return the plan of its build."""
    return build_plan(config, encoder, data, store, index, store.save_snapshot(index.version, encoder.save))


def build_plan(
    config: Config, encoder: Encoder, data: Corpus, store: VersionStore, index: IndexState, weights_sha256: str
) -> BuildPlan:
    require_store_of(data.corpus, encoder)
    kind = IndexKind(store=data.corpus.url) if data.corpus.url else index_kind(config, encoder.dim, len(data.corpus))
    corpus_path, root = data.corpus_path.absolute(), store.root.absolute()
    return BuildPlan(
        version=index.version,
        step=index.step,
        weights_sha256=weights_sha256,
        corpus_path=os.path.relpath(corpus_path, root) if corpus_path.is_relative_to(root.parent) else str(corpus_path),
        corpus_sha256=data.corpus_sha256,
        num_documents=len(data.corpus),
        block_documents=BLOCK_DOCUMENTS,
        similarity=encoder.similarity,
        max_tokens=encoder.max_tokens,
        dim=encoder.dim,
        modules=encoder.pooling,
        query_prompt=encoder.prompt("query"),
        document_prompt=encoder.prompt("document"),
        dims=encoder.dims,
        dtype=dtype_name(config.index.dtype.value),
        tokens_per_batch=ENCODER_TOKENS["cuda" if index_actors().build_on_gpu else "cpu"],
        kind=kind,
        num_shards=1 if kind.is_exact else config.index.num_shards or 1,  # exact vectors suit any number
    )


def require_same_index(config: Config, encoder: Encoder, data: Corpus, store: VersionStore) -> None:
    """Raise UserError if version 0 of an index has another corpus or encoder, before anything is overwritten."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        digest = weights_sha256(Path(folder))
    store.require_same_vectors(build_plan(config, encoder, data, store, IndexState(0, 0), digest))


def require_store_of(corpus: CorpusStore, encoder: Encoder) -> None:
    """Embed a few documents of a store; raises UserError if another encoder made the stored vectors."""
    if not isinstance(corpus, StoredCorpus):
        return
    expected = "expected the encoder that embedded the store as retriever.path"
    if encoder.dim != corpus.dim:
        raise UserError(
            f"data.corpus: {corpus.url} holds vectors of {corpus.dim} numbers, and the retriever's have "
            f"{encoder.dim}; {expected}"
        )
    if corpus.similarity not in (None, encoder.similarity):
        raise UserError(
            f"data.corpus: {corpus.url} compares vectors by {corpus.similarity}, and the retriever by "
            f"{encoder.similarity}; set retriever.similarity={corpus.similarity}"
        )
    rows = corpus.sample(np.random.default_rng(0))
    stored, own = (
        corpus.vectors(rows, "cosine"),
        comparable(encoder.encode_document(corpus.texts(rows)).numpy(), "cosine"),
    )
    mean = float((stored * own).sum(axis=1).mean())
    if mean < ANOTHER_ENCODER:
        raise UserError(
            f"data.corpus: the vectors in {corpus.url} have a mean cosine of {mean:.2f} with the retriever's "
            f"vectors of the same documents; {expected}"
        )
    if mean < SAME_ENCODER:
        log.warning(f"the vectors in {corpus.url} have a mean cosine of only {mean:.2f} with the retriever's own")


def build_version(config: Config, encoder: Encoder, data: Corpus, index: IndexService, at: IndexState) -> None:
    """Embed, publish and load a version now, resuming an unfinished build."""
    index.build(publish_snapshot(config, encoder, data, index.store, at)).result()
    index.prepare(at.version)
