"""The frozen records that cross packages and processes. Shapes: B queries, K documents."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Document:
    """A unit of retrieval. `source` names the text it was cut from; `domain` is for reporting."""

    id: str
    text: str
    domain: str
    source: str


@dataclass(frozen=True, slots=True)
class Example:
    """A text split in two: documents are retrieved for `context`, the LM is scored on `continuation`.

    `gold` are ids of documents known to be right; they only ever measure.
    """

    id: str
    context: str
    continuation: str
    domain: str
    source: str | None = None
    gold: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Nearest documents: rows of the corpus [B, K], similarities [B, K] descending, and who answered."""

    doc_rows: np.ndarray
    similarities: np.ndarray
    index_version: int


@dataclass(frozen=True, slots=True)
class RetrievedBatch:
    """The documents of one training batch, with the step its queries were encoded at and the index it saw."""

    step: int
    query_step: int
    index_version: int  # -1: from labels, which are of no index
    index_step: int  # the step whose weights embedded the index
    query_rows: np.ndarray  # [B]
    doc_rows: np.ndarray  # [B, K]
    similarities: np.ndarray  # [B, K], stale: index vectors against queries of query_step


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A retrieved batch with what the LM said of it: nats [B, K] and continuation lengths [B]."""

    retrieved: RetrievedBatch
    sum_logprobs: np.ndarray
    num_tokens: np.ndarray
