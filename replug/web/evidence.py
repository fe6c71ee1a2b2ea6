"""From a question to its passages: an engine is asked, its pages are read, and their passages ordered by TF-IDF.

    finder = evidence_finder(config.web, folder)
    found = finder.find("who wrote the art of war")
    found.passages[0].text, found.passages[0].url, found.failures

With a snapshot, an engine is asked once for a question and its settings, and a page is fetched once: the same question
gets the same evidence again, without the network. What gave nothing is counted by its reason.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.config.rules import web_problems
from replug.models.http.request_budget import RequestBudget
from replug.web.engine import make_engine
from replug.web.extraction import Extractor, split_passages, tfidf_cosines, tfidf_probabilities
from replug.web.fetch import Fetcher, FetchLimits, HostPort, is_of_host
from replug.web.records import EngineRefused, EngineResult, FoundEvidence, Passage, SearchEngine
from replug.web.snapshot import BUDGET, KeptPage, KeptSearch, Snapshot, WebPages

LIMITS = FetchLimits()
SENTENCES_PER_PASSAGE = 6  # Lazaridou et al. 2022


class EvidenceFinder:
    """Find passages for questions. `pages` reads an engine's results, None for an engine that holds the texts itself.

    `find` raises BudgetSpent, UserError, and RunError if the snapshot cannot be written.
    """

    def __init__(
        self,
        engine: SearchEngine,
        web: WebConfig,
        pages: WebPages | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._engine, self._web, self._pages, self._snapshot = engine, web, pages, snapshot

    def find(self, question: str) -> FoundEvidence:
        """Return the passages for a question, and what gave nothing."""
        failures: Counter[str] = Counter()
        search = self._search(question)
        if search.refusal:
            failures[f"engine_{search.refusal}"] += 1
        elif not search.results:
            failures["no_results"] += 1
        pages = list(self._distinct(self._read(search.results, failures), failures))
        texts = tuple(page.text for _, page in pages)
        return FoundEvidence(question, self._ranked(question, pages), dict(sorted(failures.items())), texts)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()

    def _search(self, question: str) -> KeptSearch:
        asked = self._engine.identity, question, self._web.num_results
        known = self._snapshot.search(*asked) if self._snapshot else None
        if known is not None:
            return known
        today = datetime.now(UTC).date().isoformat()
        try:
            search = KeptSearch(*asked, today, tuple(self._engine.search(question, self._web.num_results)))
        except EngineRefused as refused:
            search = KeptSearch(*asked, today, refusal=refused.reason)
        if self._snapshot:
            self._snapshot.keep_search(search)
        return search

    def _read(self, results: Sequence[EngineResult], failures: Counter[str]) -> Iterator[tuple[EngineResult, KeptPage]]:
        """Yield results with their pages that have a text, in the engine's order."""
        problems = {one.url: self._host_problem(one.url) for one in results if one.text is None}
        failures.update(problem for problem in problems.values() if problem)
        wanted = [url for url, problem in problems.items() if problem is None]
        if wanted and self._pages is None:
            raise UserError(f"{self._engine.identity} found URLs, but there is nothing to read them by")
        read = dict(zip(wanted, self._pages.read(wanted) if self._pages and wanted else (), strict=True))
        for result in results:
            if result.text is not None:
                yield result, KeptPage(result.url, "", result.url, result.title, result.text)
            elif page := read.get(result.url):
                reason = page.failure or self._host_problem(page.final_url) or self._date_problem(result, page)
                if reason:
                    failures[reason] += 1
                    continue
                failures.update(["kept_with_broken_characters"] if page.broken else [])
                yield result, page

    def _host_problem(self, url: str) -> str | None:
        if is_of_host(url, self._web.blocked_hosts):
            return "blocked_host"
        return "other_site" if self._web.site and not is_of_host(url, [self._web.site]) else None

    def _date_problem(self, result: EngineResult, page: KeptPage) -> str | None:
        """Return why a page is not used with `web.before`: its latest known date must be earlier."""
        dates = [day for day in (result.published, page.published) if day]
        if self._web.before is None:
            return None
        if not dates:
            return "undated"
        return "too_recent" if max(dates) >= self._web.before else None

    def _distinct(
        self, pages: Iterator[tuple[EngineResult, KeptPage]], failures: Counter[str]
    ) -> Iterator[tuple[EngineResult, KeptPage]]:
        """Yield pages whose URL and text differ from those before."""
        seen: set[str] = set()
        for result, page in pages:
            marks = {page.text} if result.text is not None else {page.final_url, page.text}
            if marks & seen:
                failures["duplicate"] += 1
            else:
                seen |= marks
                yield result, page

    def _ranked(self, question: str, pages: Sequence[tuple[EngineResult, KeptPage]]) -> tuple[Passage, ...]:
        parts = [
            (result, page, text) for result, page in pages for text in split_passages(page.text, SENTENCES_PER_PASSAGE)
        ]
        if not parts:
            return ()
        cosines = tfidf_cosines(question, [text for _, _, text in parts])
        best = np.argsort(-cosines, kind="stable")[: self._web.max_passages]  # stable: by rank, then place
        probabilities = tfidf_probabilities(cosines[best])
        return tuple(
            Passage(
                text,
                page.final_url,
                result.title or page.title,
                page.fetched or None,
                result.rank,
                float(cosines[row]),
                probability,
                result.doc_id,
            )
            for row, probability in zip(best.tolist(), probabilities.tolist(), strict=True)
            for result, page, text in [parts[row]]
        )


def evidence_finder(
    web: WebConfig,
    folder: Path,
    local: SearchEngine | None = None,
    limits: FetchLimits = LIMITS,
    exempt: Collection[HostPort] = (),
) -> EvidenceFinder:
    """Return the finder; `local` is what web.engine=local searches by.

    The snapshot lies in `folder` unless `web.snapshot` names another. Pages come from public addresses only, and from
    the pairs of host and port in `exempt`: tests name their own servers there, and no configuration can. Raises
    UserError for what the section has wrong, or the environment lacks.
    """
    for problem in web_problems(web):
        raise UserError(problem)
    if web.engine == "local":
        return EvidenceFinder(make_engine(web, RequestBudget(None, web.max_requests, section="web"), local), web)
    snapshot = Snapshot(Path(web.snapshot).expanduser() if web.snapshot else folder)
    engine = make_engine(web, RequestBudget(snapshot.folder / BUDGET, web.max_requests, section="web"), local)
    return EvidenceFinder(engine, web, WebPages(Fetcher(limits, exempt), Extractor(), snapshot), snapshot)
