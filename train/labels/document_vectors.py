"""Vectors of labelled candidates whose encoder stays as it is: embedded once, looked up in every step after."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replug.data.progress import Progress
from replug.data.store import CorpusStore
from replug.models.encoder import Encoder

BLOCK = 1024  # documents between two lines of progress


@dataclass(frozen=True, slots=True)
class DocumentVectors:
    """`vectors` [U, D] of the corpus' rows `rows` [U], which ascend."""

    rows: np.ndarray
    vectors: Tensor

    def of(self, rows: np.ndarray) -> Tensor:
        """[N, D] of rows that are all among them, in their order."""
        return self.vectors[torch.from_numpy(np.searchsorted(self.rows, rows))]


def embedded(documents: Encoder, corpus: CorpusStore, rows: np.ndarray) -> Tensor:
    """[N, D] of the corpus' rows, without gradient."""
    return documents.encode_tokens(documents.document_ids(corpus, rows), prompt=documents.prompts.document)


def candidate_vectors(documents: Encoder, corpus: CorpusStore, rows: np.ndarray) -> DocumentVectors:
    """Of the corpus' rows, which ascend. The same rows give the same vectors, so a resumed training has them too."""
    return DocumentVectors(rows, torch.cat(list(_blocks(documents, corpus, rows))))


def _blocks(documents: Encoder, corpus: CorpusStore, rows: np.ndarray) -> Iterator[Tensor]:
    progress = Progress("embedding candidates", len(rows))
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        yield embedded(documents, corpus, block)
        progress.advance(len(block))
