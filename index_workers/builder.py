"""Embed the corpus file by file, and each file block by block. A plain class; `service` makes actors of it.

A block's vectors follow from its texts and the snapshot alone, so every builder writes the same bytes, also when it
repeats a block. One call computes while another reads its documents or writes its vectors. A killed builder loses the
files in progress: at most a 256th of the corpus, or 130,000 documents.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from replug.cluster.places import keep_to_memory_bound
from replug.config.errors import UserError
from replug.data.store import CorpusStore
from replug.index_workers import faiss_index
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.exact_search import BlockVectors, ExactShard
from replug.index_workers.kinds import training_rows
from replug.index_workers.version_store import VersionStore, weights_sha256
from replug.models.encoder import Encoder
from replug.models.hardware import DTYPES, default_device


class Builder:
    """Embeds files of any version; holds one encoder at a time. Calls may overlap."""

    def __init__(self, root: Path, threads: int) -> None:
        keep_to_memory_bound()
        torch.set_num_threads(threads)
        self._store = VersionStore(root)
        # The plan's `vectors()`, the encoder, and the corpus.
        self._loaded: tuple[dict[str, object], Encoder, CorpusStore] | None = None
        self._loading, self._tokenizing, self._computing = threading.Lock(), threading.Lock(), threading.Lock()

    def embed_file(self, plan: BuildPlan, file: int) -> float:
        """Embed, check and write one file of vectors; returns the seconds that computing them took.

        Raises UserError if the encoder or the corpus differs from the plan.
        """
        (encoder, corpus), rows = self._load(plan), plan.rows_of_file(file)
        ids = self._file_ids(encoder, corpus, plan, file)
        vectors = np.empty((len(rows), plan.dim), np.float16)
        with self._computing:  # one file at a time; meanwhile the next is read and the last written
            began = time.monotonic()
            for block in plan.blocks_of_file(file):
                of_file = slice(block.start - rows.start, block.stop - rows.start)
                vectors[of_file] = encoder.encode_tokens(ids[of_file], plan.tokens_per_batch).numpy()
            seconds = time.monotonic() - began
        _check_finite(plan, corpus, vectors, rows)
        self._store.write_vectors(plan.version, file, vectors)
        return seconds

    def encode(self, plan: BuildPlan, texts: Sequence[str]) -> np.ndarray:
        """Return vectors [N, D] float32 of queries, by the encoder of a version."""
        encoder, _ = self._load(plan)
        ids = self._token_ids(encoder, texts, "query")
        with self._computing:
            return encoder.encode_tokens(ids, plan.tokens_per_batch, "query").numpy()

    def make_quantizer(self, plan: BuildPlan) -> None:
        """Train a quantizer on a sample of the vectors.

        This step and `build_shard` can be repeated, by any builder, with the same result.
        """
        assert plan.kind.factory is not None
        sample = self._vectors(plan).take(training_rows(plan.kind.factory, plan.num_documents))
        path = self._store.quantizer_path(plan.version)
        self._store.write_marked(path, lambda out: faiss_index.train_quantizer(plan.kind, sample, out))

    def build_shard(self, plan: BuildPlan, shard: int) -> None:
        """Fill the trained index with one shard's vectors, one file in memory at a time."""
        store, files = self._store, plan.files_of_shard(shard)
        quantizer = store.quantizer_path(plan.version)
        store.check(plan.version, [quantizer, *store.vectors_paths(plan, files)])
        vectors = store.open_vectors(plan, files)
        store.write_marked(store.shard_path(plan.version, shard), lambda out: faiss_index.fill(quantizer, vectors, out))

    def search_exactly(
        self, plan: BuildPlan, part: int, parts: int, queries: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and similarities [B, <=k] by the float16 vectors of one part of a version of any kind."""
        return ExactShard(self._vectors(plan, part, parts), torch.device("cpu")).search(queries, k)

    def _vectors(self, plan: BuildPlan, part: int = 0, parts: int = 1) -> BlockVectors:
        vectors = self._store.open_vectors(plan, plan.files_of_shard(part, parts))
        return BlockVectors(plan.rows_of_shard(part, parts).start, vectors, plan.dim)

    def _file_ids(self, encoder: Encoder, corpus: CorpusStore, plan: BuildPlan, file: int) -> list[np.ndarray]:
        if corpus.tokens_by == encoder.token_rule.fingerprint:  # the corpus was prepared for this tokenizer
            return corpus.token_ids(plan.rows_of_file(file))
        texts = map(corpus.texts, plan.blocks_of_file(file))  # one block in memory at a time
        return [row for block in texts for row in self._token_ids(encoder, block, "document")]

    def _token_ids(self, encoder: Encoder, texts: Sequence[str], task: str) -> list[np.ndarray]:
        with self._tokenizing:  # a tokenizer refuses concurrent use
            return encoder.token_ids(texts, task)

    def _load(self, plan: BuildPlan) -> tuple[Encoder, CorpusStore]:
        """Return encoder and corpus of a plan, loaded again only if they differ from the last plan's."""
        same = replace(plan, version=0, step=0, tokens_per_batch=0).vectors()
        with self._loading:
            if self._loaded is None or self._loaded[0] != same:
                # A corpus is opened once for all its versions: thousands of files take seconds, and twice the mappings.
                is_same = self._loaded is not None and self._loaded[0]["corpus_sha256"] == plan.corpus_sha256
                corpus = self._loaded[2] if self._loaded is not None and is_same else self._store.open_corpus(plan)
                self._loaded = same, self._load_encoder(plan), corpus
            return self._loaded[1:]

    def _load_encoder(self, plan: BuildPlan) -> Encoder:
        folder = self._store.encoder_folder(plan.version)
        encoder = Encoder(str(folder), plan.similarity, plan.max_tokens, dims=plan.dims)
        if weights_sha256(folder) != plan.weights_sha256:
            raise UserError(
                f"{folder} differs from the encoder that index version {plan.version} was begun with; remove "
                f"{folder.parent} and build it again"
            )
        return encoder.to(default_device(), DTYPES[plan.dtype])


def _check_finite(plan: BuildPlan, corpus: CorpusStore, vectors: np.ndarray, rows: range) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        documents = corpus.documents([rows[int(i)] for i in bad[:3]])
        beyond = ", or is its arithmetic beyond 65,504 in index.dtype=float16: take bfloat16 or float32"
        raise ValueError(
            f"the encoder of index version {plan.version} gives vectors that float16 cannot hold for "
            f"{len(bad)} documents, first {', '.join(doc.id for doc in documents)}: did training diverge"
            f"{beyond if plan.dtype == 'float16' else ''}?"
        )
