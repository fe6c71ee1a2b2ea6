"""From a question to its passages: an engine is asked, its pages are read, and their passages ordered by TF-IDF.

    finder = evidence_finder(config.web, folder)
    found = finder.find("who wrote the art of war")
    found.passages[0].text, found.passages[0].url, found.failures

An engine is asked once for a question and its settings, and a page is fetched once: with its snapshot the same question
gets the same evidence again, without the network. Pages and searches that gave nothing are counted by their reason.
Documents of a corpus, which a retriever or BM25 found, are cut and ordered likewise (`found_in_documents`).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.config.rules import web_problems
from replug.models.ensemble import Retrieved
from replug.models.http.request_budget import RequestBudget
from replug.web.engine import ApiEngine, make_engine
from replug.web.extraction import Extractor, split_passages, tfidf_cosines, tfidf_probabilities
from replug.web.fetch import Fetcher, FetchLimits, HostPort
from replug.web.records import EngineRefused, EngineResult, FoundEvidence, Passage, passages_of_documents
from replug.web.snapshot import BUDGET, KeptSearch, Snapshot, WebPages

LIMITS = FetchLimits()
SENTENCES_PER_PASSAGE = 6  # Lazaridou et al. 2022


class EvidenceFinder:
    """Find passages for questions. `pages` reads an engine's results.

    `find` raises BudgetSpent, UserError, and RunError if the snapshot cannot be written.
    """

    def __init__(self, engine: ApiEngine, web: WebConfig, pages: WebPages, snapshot: Snapshot | None = None) -> None:
        self._engine, self._web, self._pages, self._snapshot = engine, web, pages, snapshot

    def find(self, question: str) -> FoundEvidence:
        """Return the passages for a question, and what gave nothing."""
        failures: Counter[str] = Counter()
        search = self._search(question)
        if search.refusal:
            failures[f"engine_{search.refusal}"] += 1
        elif not search.results:
            failures["no_results"] += 1
        pages = list(self._read(search.results, failures))
        return _found(question, pages, self._web.max_passages, failures)

    def close(self) -> None:
        self._pages.close()

    def _search(self, question: str) -> KeptSearch:
        request = self._engine.identity, question, self._web.num_results
        known = self._snapshot.search(*request) if self._snapshot else None
        if known is not None:
            return known
        today = datetime.now(UTC).date().isoformat()
        try:
            search = KeptSearch(*request, today, tuple(self._engine.search(question, self._web.num_results)))
        except EngineRefused as refused:
            search = KeptSearch(*request, today, refusal=refused.reason)
        if self._snapshot:
            self._snapshot.keep_search(search)
        return search

    def _read(self, results: Sequence[EngineResult], failures: Counter[str]) -> Iterator[Passage]:
        """Yield the whole pages that have a text, in the engine's order; each URL and each text once."""
        seen: set[str] = set()
        for result, page in zip(results, self._pages.read([result.url for result in results]), strict=True):
            if page.failure:
                failures[page.failure] += 1
                continue
            failures.update(["kept_with_broken_characters"] if page.broken else [])
            if {page.final_url, page.text} & seen:
                failures["duplicate"] += 1
                continue
            seen |= {page.final_url, page.text}
            title = result.title or page.title
            yield Passage(page.text, page.final_url, title, page.fetched or None, result.rank, 0.0, 0.0)


def found_in_documents(question: str, documents: Sequence[Retrieved], max_passages: int) -> FoundEvidence:
    """Return the passages of a corpus's documents, the most similar of which come first."""
    passages = passages_of_documents(documents)
    first = {passage.text: passage for passage in reversed(passages)}
    whole = [passage for passage in passages if first[passage.text] is passage]
    failures = Counter(duplicate=len(documents) - len(whole), no_results=int(not documents))
    return _found(question, whole, max_passages, +failures)


def _found(question: str, whole: Sequence[Passage], most: int, failures: Mapping[str, int]) -> FoundEvidence:
    """Cut whole pages or documents into passages, and keep those nearest to the question by TF-IDF."""
    texts = tuple(one.text for one in whole)
    parts = [replace(one, text=text) for one in whole for text in split_passages(one.text, SENTENCES_PER_PASSAGE)]
    if not parts:
        return FoundEvidence((), dict(sorted(failures.items())), texts)
    cosines = tfidf_cosines(question, [part.text for part in parts])
    best = np.argsort(-cosines, kind="stable")[:most]  # stable: by rank, then place
    nearest = zip(best.tolist(), cosines[best].tolist(), tfidf_probabilities(cosines[best]).tolist(), strict=True)
    passages = tuple(replace(parts[row], cosine=cosine, probability=share) for row, cosine, share in nearest)
    return FoundEvidence(passages, dict(sorted(failures.items())), texts)


def evidence_finder(
    web: WebConfig, folder: Path, limits: FetchLimits = LIMITS, exempt: Collection[HostPort] = ()
) -> EvidenceFinder:
    """Return the finder by an engine of the web.

    The snapshot lies in `folder` unless `web.snapshot` names another. Pages come from public addresses only, and from
    the pairs of host and port in `exempt`: tests name their own servers there, and no configuration can. Raises
    UserError for a wrong section, and for a missing key.
    """
    for problem in web_problems(web):
        raise UserError(problem)
    snapshot = Snapshot(Path(web.snapshot).expanduser() if web.snapshot else folder)
    engine = make_engine(web, RequestBudget(snapshot.folder / BUDGET, web.max_requests, section="web"))
    return EvidenceFinder(engine, web, WebPages(Fetcher(limits, exempt), Extractor(), snapshot), snapshot)
