"""Embedding the corpus, file by file, each block by block. A plain class; `service` makes actors of it.

A block's vectors follow from its texts and the snapshot alone, so whoever embeds it, and however
often, the bytes are the same. One call computes while another reads its documents or writes its vectors.
A builder that is killed has lost the files that it was at: at most a 256th of the corpus, or 130,000 documents.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from replug.cluster.device_use import Busy, own_devices
from replug.cluster.gpus import keep_to_memory_share
from replug.config.errors import UserError
from replug.data.store import CorpusStore
from replug.index_workers import build_steps
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.token_files import TokenFiles, token_fingerprint
from replug.index_workers.version_store import VersionStore, weights_sha256
from replug.models.encoder import Encoder
from replug.models.hardware import DTYPES, default_device


@dataclass(frozen=True)
class _Loaded:
    """What the files of a plan are made with, and of plans that differ in no more than version, step and index."""

    vectors: dict[str, object]
    encoder: Encoder
    corpus: CorpusStore
    tokens: TokenFiles
    has_token_ids: bool  # the corpus was prepared for this tokenizer


@dataclass(frozen=True, slots=True)
class Embedded:
    """A file of vectors that is written: its documents, and what computing them took."""

    documents: int
    busy: Busy


class Builder:
    """Embeds files of whichever version it is asked for; holds one encoder at a time. Calls may overlap."""

    def __init__(self, root: Path, threads: int) -> None:
        keep_to_memory_share()
        torch.set_num_threads(threads)
        self._store = VersionStore(root)
        self._loaded: _Loaded | None = None
        self._devices = own_devices()
        self._loading, self._tokenizing, self._computing = threading.Lock(), threading.Lock(), threading.Lock()

    def embed_file(self, plan: BuildPlan, file: int) -> Embedded:
        """Embed, check and write one file of vectors.

        Raises UserError where encoder or corpus are not those of the plan.
        """
        loaded, rows = self._load(plan), plan.rows_of_file(file)
        ids = self._file_ids(loaded, plan, file)
        vectors = np.empty((len(rows), plan.dim), np.float16)
        with self._computing:  # one file after the other, so that the next is read and the last written meanwhile
            began = time.monotonic()
            for block in plan.blocks_of_file(file):
                of_file = slice(block.start - rows.start, block.stop - rows.start)
                vectors[of_file] = loaded.encoder.encode_tokens(
                    ids[of_file], plan.tokens_per_batch, plan.document_prompt
                ).numpy()
            seconds = time.monotonic() - began
        _check_finite(plan, loaded.corpus, vectors, rows)
        self._store.write_vectors(plan.version, file, vectors)
        return Embedded(len(rows), Busy(seconds, self._devices))

    def encode(self, plan: BuildPlan, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, D] float32 of queries, by the encoder of a version."""
        encoder = self._load(plan).encoder.of_queries
        ids = self._token_ids(encoder, texts, plan.query_prompt)
        with self._computing:
            return encoder.encode_tokens(ids, plan.tokens_per_batch, plan.query_prompt).numpy()

    def make_quantizer(self, plan: BuildPlan) -> None:
        build_steps.make_quantizer(self._store, plan)

    def build_shard(self, plan: BuildPlan, shard: int) -> None:
        build_steps.build_shard(self._store, plan, shard)

    def search_exactly(
        self, plan: BuildPlan, part: int, parts: int, queries: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return build_steps.search_exactly(self._store, plan, part, parts, queries, k)

    def drift(self, previous: BuildPlan, plan: BuildPlan) -> float:
        return build_steps.drift(self._store, previous, plan)

    def _file_ids(self, loaded: _Loaded, plan: BuildPlan, file: int) -> list[np.ndarray]:
        if loaded.has_token_ids:
            return loaded.corpus.token_ids(plan.rows_of_file(file))
        ids = loaded.tokens.read(file)
        if ids is None:
            texts = map(loaded.corpus.texts, plan.blocks_of_file(file))  # those of a block in memory at a time
            ids = [row for block in texts for row in self._token_ids(loaded.encoder, block, plan.document_prompt)]
            loaded.tokens.write(file, ids)
        return ids

    def _token_ids(self, encoder: Encoder, texts: Sequence[str], prompt: str) -> list[np.ndarray]:
        with self._tokenizing:  # a tokenizer refuses to be used by two threads at once
            return encoder.token_ids(texts, prompt)

    def _load(self, plan: BuildPlan) -> _Loaded:
        """Encoder, corpus and tokens of a plan, loaded and compared with it where the last call had others."""
        vectors = replace(plan, version=0, step=0, tokens_per_batch=0).vectors()
        with self._loading:
            if self._loaded is None or self._loaded.vectors != vectors:
                encoder = self._load_encoder(plan)
                tokens = TokenFiles(self._store.root, token_fingerprint(encoder.tokenizer, plan))
                corpus = self._corpus(plan)
                prepared = corpus.tokens_by == encoder.token_rule.fingerprint
                self._loaded = _Loaded(vectors, encoder, corpus, tokens, prepared)
            return self._loaded

    def _load_encoder(self, plan: BuildPlan) -> Encoder:
        folder = self._store.encoder_folder(plan.version)
        encoder = Encoder(str(folder), plan.similarity, plan.max_tokens, dims=plan.dims)
        for name, found, expected in (
            ("weights_sha256", weights_sha256(folder), plan.weights_sha256),
            ("dim", encoder.dim, plan.dim),
            ("modules", encoder.pooling, plan.modules),
            ("query_prompt", encoder.prompts.query, plan.query_prompt),
            ("document_prompt", encoder.prompts.document, plan.document_prompt),
        ):
            if found != expected:
                raise UserError(
                    f"the encoder of index version {plan.version} is not the one it was begun with: {folder} has "
                    f"{name} {found}, expected {expected}; remove {self._store.folder(plan.version)} and build it again"
                )
        return encoder.to(default_device(), DTYPES[plan.dtype])

    def _corpus(self, plan: BuildPlan) -> CorpusStore:
        """Opened once for all versions over it: thousands of files take seconds, and twice the mappings."""
        if self._loaded is not None and self._loaded.vectors["corpus_sha256"] == plan.corpus_sha256:
            return self._loaded.corpus
        return self._load_corpus(plan)

    def _load_corpus(self, plan: BuildPlan) -> CorpusStore:
        path = self._store.corpus_path(plan)
        corpus = CorpusStore(path)
        if len(corpus) != plan.num_documents:
            raise UserError(
                f"{path} holds {len(corpus)} documents, but index version {plan.version} was begun over "
                f"{plan.num_documents}: put that corpus back, or remove {self._store.root} and build it again"
            )
        return corpus


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
