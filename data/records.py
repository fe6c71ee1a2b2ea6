"""The frozen records that cross packages and processes. Shapes: B queries, K documents."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Document:
    """A unit of retrieval. `source` names the text it was cut from; `domain` is for reporting.

    The retriever embeds `embedded_title` before the text, the LM does not read it.
    """

    id: str
    text: str
    domain: str
    source: str
    embedded_title: str = ""

    @property
    def embedded_text(self) -> str:
        """Return the retriever's input: "title text", as Contriever's and REPLUG's authors do."""
        return f"{self.embedded_title} {self.text}" if self.embedded_title else self.text


@dataclass(frozen=True, slots=True)
class Example:
    """A text split in two: the LM reads `context`, and is scored on `continuation`.

    Documents are retrieved for `query`, by default the context. `gold` are ids of documents known to be right; they
    serve evaluation alone. `candidates` are the row's own document ids for the LM to score, best first.
    """

    id: str
    context: str
    continuation: str
    domain: str
    source: str | None = None
    gold: tuple[str, ...] = ()
    query: str = ""
    candidates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.query:
            object.__setattr__(self, "query", self.context)

    @property
    def has_query(self) -> bool:
        """Return whether the query differs from the context."""
        return self.query != self.context

    @property
    def own_columns(self) -> set[str]:
        """Return the optional columns that the example fills: a `query` that is not the context, and `candidates`."""
        return {name for name, is_own in (("query", self.has_query), ("candidates", self.candidates)) if is_own}

    def as_row(self) -> dict[str, Any]:
        """Return the fields that the user's own rows have; optional columns only where they are filled."""
        left_out = {"query", "candidates"} - self.own_columns
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Nearest documents: rows of the corpus [B, K], similarities [B, K] descending, and the index version."""

    doc_rows: np.ndarray
    similarities: np.ndarray
    index_version: int


@dataclass(frozen=True, slots=True)
class RetrievedBatch:
    """The documents of one training batch, with the step its queries were encoded at and the index it saw."""

    step: int
    query_step: int
    index_version: int  # NO_INDEX: from labels
    index_step: int  # of the weights that embedded the index
    query_rows: np.ndarray  # [B] rows of the training examples
    doc_rows: np.ndarray  # [B, K]
    similarities: np.ndarray  # [B, K], stale: index vectors against queries of query_step


NO_INDEX = -1  # as a version: the documents were not found in an index of this run


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A retrieved batch with its LM scores: nats [B, K] and continuation lengths [B]."""

    retrieved: RetrievedBatch
    sum_logprobs: np.ndarray
    num_tokens: np.ndarray

    def take(self, rows: Any) -> "ScoredBatch":
        """Return the examples at `rows` (a slice or places [N] in the batch)."""
        batch = self.retrieved
        retrieved = replace(
            batch,
            query_rows=batch.query_rows[rows],
            doc_rows=batch.doc_rows[rows],
            similarities=batch.similarities[rows],
        )
        return ScoredBatch(retrieved, self.sum_logprobs[rows], self.num_tokens[rows])
