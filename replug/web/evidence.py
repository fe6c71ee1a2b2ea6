"""From a question to its passages: an engine is asked, its pages are read, and their passages ordered by TF-IDF.

    finder = evidence_finder(config.web, folder)       # web/evidence.py
    found = finder.find("who wrote the art of war")
    found.passages[0].text, found.passages[0].url, found.failures

With a snapshot, an engine is asked once for a question and its settings, and a page is fetched once: whoever asks again
gets the same evidence, without the network. What gave nothing is counted by its reason.

A passage is up to six sentences (Lazaridou et al. 2022, section 2.2), by `sentencex`, which needs no download and whose
time is linear in the text. A blank line or line break of the main text ends a sentence and not a passage. Nearness to
the question is the cosine of TF-IDF vectors by scikit-learn's defaults (words of two letters or more in lower case;
idf = log((1 + N) / (1 + n_w)) + 1), whose N passages are those of this question, as the paper's are. p_tfidf(p|q) is
the cosine over the sum of the cosines of the passages that are kept, no softmax.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import sentencex
from sklearn.feature_extraction.text import TfidfVectorizer

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.config.rules import web_problems
from replug.models.http.request_budget import RequestBudget
from replug.web.engines import make_engine
from replug.web.fetching import Fetcher, FetchLimits
from replug.web.network import HostPort, is_of_host
from replug.web.pages import BUDGET, Extractor, KeptPage, KeptSearch, PageSource, Snapshot, WebPages
from replug.web.records import EngineRefused, EngineResult, FoundEvidence, Passage, SearchEngine

LANGUAGE = "en"


def split_passages(text: str, sentences_per_passage: int) -> list[str]:
    """Texts of so many sentences, the last of the rest; white space is single."""
    sentences = [
        " ".join(sentence.split())
        for line in text.splitlines()
        if line.strip()
        for sentence in sentencex.segment(LANGUAGE, line)
    ]
    sentences = [sentence for sentence in sentences if sentence]
    starts = range(0, len(sentences), sentences_per_passage)
    return [" ".join(sentences[start : start + sentences_per_passage]) for start in starts]


def tfidf_cosines(question: str, passages: Sequence[str]) -> np.ndarray:
    """Cosines float64 [N] in 0 to 1 of each passage with the question; 0 where they share no word."""
    vectorizer = TfidfVectorizer()
    words_of = vectorizer.build_analyzer()
    if not any(words_of(passage) for passage in passages):
        return np.zeros(len(passages))  # which scikit-learn refuses
    vectors = vectorizer.fit_transform(passages)
    return np.clip((vectors @ vectorizer.transform([question]).T).toarray()[:, 0], 0.0, 1.0)


def tfidf_probabilities(cosines: np.ndarray) -> np.ndarray:
    """p_tfidf(p|q) [N]: shares of the sum; even where all are 0."""
    total = cosines.sum()
    return cosines / total if total > 0 else np.full(len(cosines), 1.0 / max(1, len(cosines)))


LOCAL = "local"
LIMITS = FetchLimits()


@dataclass(frozen=True, slots=True)
class _Page:
    """A result with its text. `fetched` is None where the engine held the text."""

    result: EngineResult
    url: str
    title: str
    text: str
    fetched: str | None


class EvidenceFinder:
    """`pages` are where an engine's results are read, None for an engine that holds the texts itself.

    `find` raises BudgetSpent, UserError, and RunError where the snapshot cannot be written.
    """

    def __init__(
        self,
        engine: SearchEngine,
        web: WebConfig,
        pages: PageSource | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._engine, self._web, self._pages, self._snapshot = engine, web, pages, snapshot

    @property
    def identity(self) -> str:
        """What the evidence follows from, but for the web's state: engine and settings."""
        names = ("num_results", "max_passages", "sentences_per_passage", "before", "site", "blocked_hosts")
        return " ".join([self._engine.identity, *(f"{name}={getattr(self._web, name)}" for name in names)])

    def find(self, question: str) -> FoundEvidence:
        failures: Counter[str] = Counter()
        search = self._search(question)
        if search.refusal:
            failures[f"engine_{search.refusal}"] += 1
        elif not search.results:
            failures["no_results"] += 1
        pages = list(self._distinct(self._read(self._allowed(search.results, failures), failures), failures))
        return FoundEvidence(question, self._ranked(question, pages), dict(sorted(failures.items())))

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
            results = self._engine.search(question, self._web.num_results)
            search = KeptSearch(*asked, today, tuple(results))
        except EngineRefused as refused:
            search = KeptSearch(*asked, today, refusal=refused.reason)
        if self._snapshot:
            self._snapshot.keep_search(search)
        return search

    def _allowed(self, results: Sequence[EngineResult], failures: Counter[str]) -> list[EngineResult]:
        reasons = [None if result.text is not None else self._host_problem(result.url) for result in results]
        failures.update(reason for reason in reasons if reason)
        return [result for result, reason in zip(results, reasons, strict=True) if reason is None]

    def _host_problem(self, url: str) -> str | None:
        if is_of_host(url, self._web.blocked_hosts):
            return "blocked_host"
        return "other_site" if self._web.site and not is_of_host(url, [self._web.site]) else None

    def _read(self, results: Sequence[EngineResult], failures: Counter[str]) -> Iterator[_Page]:
        """Pages with a text, in the engine's order."""
        wanted = [result.url for result in results if result.text is None]
        if wanted and self._pages is None:
            raise UserError(f"{self._engine.identity} found URLs, but there is nothing to read them by")
        read = dict(zip(wanted, self._pages.read(wanted) if self._pages and wanted else (), strict=True))
        for result in results:
            if result.text is not None:
                yield _Page(result, result.url, result.title, result.text, None)
                continue
            kept = read[result.url]
            reason = kept.failure or self._host_problem(kept.final_url) or self._date_problem(result, kept)
            if reason:
                failures[reason] += 1
                continue
            failures.update(["kept_with_broken_characters"] if kept.broken else [])
            yield _Page(result, kept.final_url, result.title or kept.title, kept.text, kept.fetched)

    def _date_problem(self, result: EngineResult, page: KeptPage) -> str | None:
        """With `before`, the latest date that engine and page give must be before it, and one must be given."""
        dates = [date for date in (result.published, page.published) if date]
        if self._web.before is None:
            return None
        if not dates:
            return "undated"
        return "too_recent" if max(dates) >= self._web.before else None

    def _distinct(self, pages: Iterator[_Page], failures: Counter[str]) -> Iterator[_Page]:
        """Pages of other URLs and other texts than those before."""
        seen: set[str] = set()
        for page in pages:
            marks = {page.text} if page.result.text is not None else {page.url, page.text}
            if marks & seen:
                failures["duplicate"] += 1
            else:
                seen |= marks
                yield page

    def _ranked(self, question: str, pages: Sequence[_Page]) -> tuple[Passage, ...]:
        parts = [(page, text) for page in pages for text in split_passages(page.text, self._web.sentences_per_passage)]
        if not parts:
            return ()
        cosines = tfidf_cosines(question, [text for _, text in parts])
        best = np.argsort(-cosines, kind="stable")[: self._web.max_passages]  # stable: by rank, then place
        probabilities = tfidf_probabilities(cosines[best])
        passages = []
        for row, share in zip(best.tolist(), probabilities.tolist(), strict=True):
            page, text = parts[row]
            rank, doc_id = page.result.rank, page.result.doc_id
            passages.append(Passage(text, page.url, page.title, page.fetched, rank, float(cosines[row]), share, doc_id))
        return tuple(passages)


def evidence_finder(
    web: WebConfig,
    folder: Path,
    local: SearchEngine | None = None,
    limits: FetchLimits = LIMITS,
    exempt: Collection[HostPort] = (),
) -> EvidenceFinder:
    """`local` is what web.engine=local searches by. The snapshot lies in `folder` unless `web.snapshot` says where.

    Pages come from public addresses only, and from the pairs of host and port in `exempt`: tests name their own servers
    there, and no configuration can. Raises UserError for what the section has wrong, or the environment lacks.
    """
    for problem in web_problems(web):
        raise UserError(problem)
    snapshot = Snapshot(Path(web.snapshot).expanduser() if web.snapshot else folder)
    budget_file = None if web.engine == LOCAL else snapshot.folder / BUDGET
    budget = RequestBudget(budget_file, web.max_requests, section="web")
    engine = make_engine(web, budget, local)
    if web.engine == LOCAL:
        return EvidenceFinder(engine, web)
    pages = WebPages(Fetcher(limits, exempt), Extractor(), snapshot)
    return EvidenceFinder(engine, web, pages, snapshot)
