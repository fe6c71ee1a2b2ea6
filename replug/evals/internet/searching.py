"""What a search engine finds for every question: one on the web, or the documents of a corpus found as for any method.

What engines answered and pages are kept in a snapshot, so an interrupted search asks nobody twice.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, REPLUG, Method
from replug.data.progress import Progress
from replug.evals.evidence import Evidence, EvidenceBook
from replug.web.records import EngineResult, FoundEvidence

if TYPE_CHECKING:  # scikit-learn takes seconds to import, which looking for problems can do without
    from replug.web.evidence import EvidenceFinder

log = logging.getLogger(__name__)

LOCAL, SEARCH = "local", "search"  # the engine; the name of what is found for it


def searches(config: EvaluationConfig) -> list[Method]:
    """What the local engine finds: by `retriever.path` where there is one, else by BM25. None of other engines."""
    if config.web.engine != LOCAL or not any(name not in ("none", "gold") for name in config.methods):
        return []
    return [Method(SEARCH, REPLUG if config.retriever.path else BM25, config.web.num_results, False)]


class CorpusEngine:
    """A `SearchEngine` of what was found in a corpus before: results by query."""

    def __init__(self, source: str, results: Mapping[str, Sequence[EngineResult]]) -> None:
        self.identity, self._results = f"local {source}", results

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        return list(self._results[query][:num_results])


def corpus_engine(method: Method, book: EvidenceBook, queries: Sequence[str]) -> CorpusEngine:
    """Of the documents that a book has for every query."""
    return CorpusEngine(
        method.source,
        {query: _results(method, book, row, book.of(row)[method.name]) for row, query in enumerate(queries)},
    )


def _results(method: Method, book: EvidenceBook, row: int, evidence: Evidence) -> list[EngineResult]:
    """A document that BM25 finds no word in is none."""
    found = zip(book.ids(evidence.doc_rows), evidence.texts, book.similarities(method, row), strict=False)
    return [
        EngineResult(f"document:{name}", "", rank, text, name, float(similarity))
        for rank, (name, text, similarity) in enumerate(found, start=1)
        if method.source != BM25 or similarity > 0
    ]


def find_for_all(finder: "EvidenceFinder", queries: Mapping[str, str]) -> dict[str, FoundEvidence]:
    """By question id, given what is searched for by id. Raises what the finder does."""
    progress, found = Progress("search", len(queries)), {}
    for identifier, query in queries.items():
        found[identifier] = finder.find(query)
        progress.advance()
    _warn(list(found.values()))
    return found


def _warn(found: Sequence[FoundEvidence]) -> None:
    without = sum(not one.passages for one in found)
    if without:
        counts = sum((Counter(one.failures) for one in found), Counter())
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        log.warning(
            f"{without} of {len(found)} questions have no passage, so methods that rerank answer them with nothing"
            f"{f'; what went wrong: {reasons}' if reasons else ''}"
        )
