"""What goes from a search engine to passages: results, passages, and the evidence found for one question."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ENGINE_NAMES = ("brave", "ddgs", "google", "local", "searxng")  # of `web.engine`


@dataclass(frozen=True, slots=True)
class EngineResult:
    """A page that an engine found. `rank` counts from 1.

    `text` is given where the engine holds the page's text itself (a local corpus): nothing is fetched then.
    `published` is the page's date (ISO), where the engine says it.
    """

    url: str
    title: str
    rank: int
    text: str | None = None
    doc_id: str | None = None
    similarity: float | None = None
    published: str | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences of one page.

    `fetched` is the ISO date on which the page was kept, None for a local corpus; `rank` is its page's in the
    engine's results; `cosine` is of TF-IDF vectors with the question; `probability` is p_tfidf(p|q), the cosines
    over their sum, even where all are 0. Where a retriever orders passages both are its own (`rank_densely`).
    """

    text: str
    url: str
    title: str
    fetched: str | None
    rank: int
    cosine: float
    probability: float
    doc_id: str | None = None


@dataclass(frozen=True, slots=True)
class FoundEvidence:
    """What was found for a question: passages, best cosine first, ties by rank, then place.

    `failures` counts, by reason, pages that gave nothing and searches that an engine refused.
    """

    question: str
    passages: tuple[Passage, ...]
    failures: Mapping[str, int]


class EngineRefused(Exception):
    """An engine did not answer a query for a reason that is its own. `reason` is a short name that is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SearchEngine(Protocol):
    """Query to results, best first."""

    @property
    def identity(self) -> str:
        """Which engine with which settings, without secrets; part of the keys under which answers are kept."""
        ...

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        """At most `num_results`. Raises EngineRefused, BudgetSpent, and UserError for what the user can mend."""
        ...
