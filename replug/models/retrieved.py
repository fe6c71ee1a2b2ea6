"""Documents that were found for a text, and what finds them: an index, a few texts in memory, a search engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A document that was found. Its weight is the ensemble's softmax of `similarity` among those found with it.

    >>> lm = ReplugLM(StandInLM(), EncoderRetriever(Encoder("stand_in"), ["Basel lies on the Rhine."]), k=1)
    >>> found = [Retrieved("Nantes lies on the Loire.", similarity=0.8, id="nantes")]  # or lm.retrieve([text])[0]
    >>> lm.score("Its river is the", " Loire.", found).sum_logprob > lm.score("Its river is the", " Loire.").sum_logprob
    True
    """

    text: str
    similarity: float
    id: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.similarity):
            raise ValueError(f"document {self.id} has the similarity {self.similarity}; expected a finite number")


class Retriever(Protocol):
    """Finds documents; the same query always finds the same.

    >>> class Shelf:
    ...     def retrieve(self, queries, k):
    ...         return [[Retrieved("Basel lies on the Rhine.", 1.0, "basel")][:k] for _ in queries]
    >>> ReplugLM(StandInLM(), Shelf(), k=1).retrieve(["Basel"])[0][0].id
    'basel'
    """

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Up to `k` documents for each query, the most similar first."""
        ...


Found = Sequence[Retrieved]  # of one text
Documents = Sequence[Found]
