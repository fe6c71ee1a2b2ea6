"""A vector store as the one shard of an index version, in whose vectors the store finds documents."""

import logging
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.store import CorpusStore, StoredCorpus, comparable
from replug.index_workers.vectors import order_exactly
from replug.models.encoder import Encoder

log = logging.getLogger(__name__)

SAME_ENCODER, ANOTHER_ENCODER = 0.95, 0.5  # mean cosine of stored vectors and the encoder's


class StoreShard:
    """Asks the store of a corpus, and keeps what it gives. Similarities are products with the stored vectors."""

    is_independent = False  # what an approximate index finds depends on k

    def __init__(self, documents: Path, similarity: str) -> None:
        self._corpus, self._similarity = StoredCorpus(documents), similarity
        self._source = self._corpus.open()

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and similarities [B, <= k], best first. Raises UserError where the store finds too few."""
        results = self._source.search(queries, min(k, len(self)), self._similarity)
        if (fewest := min(map(len, results))) < min(k, len(self)):
            raise UserError(
                f"data.corpus: {self._corpus.url} finds {fewest} of the {min(k, len(self))} documents that are asked "
                "for; let its index look further, as by &options=-c%20ivfflat.probes%3D100, or search without one"
            )
        rows = np.stack([self._corpus.keep(documents, self._source) for documents in results])
        vectors = np.stack([[document.vector for document in documents] for documents in results])
        return order_exactly(queries, rows, comparable(vectors, self._similarity), k)


def require_store_of(corpus: CorpusStore, encoder: Encoder) -> None:
    """Raise UserError where the vectors of a store are not those of the encoder. It embeds a few documents to see."""
    if not isinstance(corpus, StoredCorpus):
        return
    expected = "expected the encoder that embedded the store as retriever.path"
    if encoder.dim != corpus.dim:
        raise UserError(
            f"data.corpus: {corpus.url} holds vectors of {corpus.dim} numbers, and those of the retriever have "
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
            f"data.corpus: the vectors in {corpus.url} have a mean cosine of {mean:.2f} with those that the retriever "
            f"gives for the same documents; {expected}"
        )
    if mean < SAME_ENCODER:
        log.warning(f"the vectors in {corpus.url} have a mean cosine of only {mean:.2f} with the retriever's own")
