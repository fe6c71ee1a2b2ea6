"""Embedding the corpus, block by block. A plain class; `service` makes actors of it.

A block's vectors follow from its texts and the snapshot alone, so whoever embeds it, and however
often, the bytes are the same.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data.store import CorpusStore
from index_workers import build_steps
from index_workers.version_store import BuildPlan, VersionStore
from models.encoder import Encoder
from models.hardware import DTYPES, default_device


class Builder:
    """Embeds blocks of whichever version it is asked for; holds one encoder at a time."""

    def __init__(self, root: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._store = VersionStore(root)
        self._loaded: tuple[tuple[str, str, int, str], Encoder] | None = None
        self._corpus: tuple[str, CorpusStore] | None = None

    def embed_block(self, plan: BuildPlan, block: int) -> int:
        """Embed, check and write one block; returns the number of documents."""
        rows = plan.rows_of_block(block)
        texts = self._corpus_of(plan).texts(rows)
        vectors = self._encoder_of(plan).encode(texts, plan.tokens_per_batch).numpy()
        self._check(plan, vectors, rows)
        self._store.write_block(plan.version, block, vectors)
        return len(rows)

    def encode(self, plan: BuildPlan, texts: Sequence[str]) -> np.ndarray:
        """Vectors [N, D] float32 of other texts, by the encoder of a version."""
        return self._encoder_of(plan).encode(texts, plan.tokens_per_batch).numpy()

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

    def _encoder_of(self, plan: BuildPlan) -> Encoder:
        key = (plan.weights_sha256, plan.similarity, plan.max_tokens, plan.dtype)
        if self._loaded is None or self._loaded[0] != key:
            folder = self._store.encoder_folder(plan.version)
            encoder = Encoder(str(folder), plan.similarity, plan.max_tokens)
            self._loaded = (key, encoder.to(default_device(), DTYPES[plan.dtype]))
        return self._loaded[1]

    def _corpus_of(self, plan: BuildPlan) -> CorpusStore:
        if self._corpus is None or self._corpus[0] != plan.corpus_path:
            self._corpus = (plan.corpus_path, CorpusStore(self._store.corpus_path(plan)))
        return self._corpus[1]

    def _check(self, plan: BuildPlan, vectors: np.ndarray, rows: range) -> None:
        bad = np.flatnonzero(~np.isfinite(vectors.astype(np.float16)).all(axis=1))
        if len(bad):
            documents = self._corpus_of(plan).documents([rows[int(i)] for i in bad[:3]])
            raise ValueError(
                f"the encoder of index version {plan.version} gives vectors that float16 cannot hold for "
                f"{len(bad)} documents, first {', '.join(doc.id for doc in documents)}: did training diverge?"
            )
