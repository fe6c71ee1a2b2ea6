"""Passages for a question: query a search engine, read its pages, and rank their passages by TF-IDF.

    finder = EvidenceFinder(config.web, folder)
    found = finder.find("who wrote the art of war")
    found.passages[0].text, found.passages[0].url, found.failures

Each question with its settings is searched once, and each page fetched once: from the snapshot the same question gets
the same evidence again, without the network. Failed pages and searches are counted by reason.

SNAPSHOT/searches/          the results of each query
SNAPSHOT/refused_searches/  reasons of refused queries; remove the folder to search again
SNAPSHOT/pages/             main text, title, final URL, date; not the HTML
SNAPSHOT/failed_pages/      reasons of failed pages; remove the folder to fetch these again
SNAPSHOT/requests.json      the budget: requests to engines so far

An entry is a file with a checksum, named by a hash of its request and renamed when complete. A damaged or
mismatched entry is refused by name, because a new one would make a different snapshot. One process at a time writes to
a folder.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.data.folder import read_mark, write_mark
from replug.models.http.request_budget import RequestBudget
from replug.models.score_cache import hashed
from replug.web.engine import EngineRefused, Entry, SearchEngine
from replug.web.extraction import Extractor, FetchFailed, decode_page
from replug.web.fetch import Downloaded, Fetcher, FetchLimits, HostPort
from replug.web.passages import MAX_PASSAGES, FoundEvidence, Passage, nearest_passages

KEY_BYTES = 16
BUDGET = "requests.json"
THREADS = 32  # a hanging DNS look-up occupies one for half a minute
LIMITS = FetchLimits()
FIX_HINT = "bring the snapshot back, or remove the file to ask again, which makes it another snapshot"


@dataclass(frozen=True, slots=True)
class KeptPage:
    """A page as it was on a date (ISO). `failure` is the reason for having no text, None if it has one."""

    url: str
    fetched: str
    final_url: str = ""
    title: str = ""
    text: str = ""
    failure: str | None = None


class Snapshot:
    """The folder of entries, created by the first write. Reading raises UserError for a damaged entry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, kinds: Sequence[str], request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the entry of a request from the first of `kinds` that has one, else None."""
        for path in (self._path(kind, request) for kind in kinds):
            if path.exists():
                entry = read_mark(path, FIX_HINT)
                if not request.items() <= entry.items():
                    raise UserError(f"{path} is damaged: it answers another question; {FIX_HINT}")
                return entry
        return None

    def write(self, kind: str, request: Mapping[str, Any], entry: dict[str, Any]) -> None:
        path = self._path(kind, request)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mark(path, entry)

    def _path(self, kind: str, request: Mapping[str, Any]) -> Path:
        name = hashed(*(f"{name}={value}" for name, value in request.items()), size=KEY_BYTES).hex()
        return self.folder / kind / name[:2] / f"{name}.json"


class EvidenceFinder:
    """Find passages for questions in the snapshot, else on the web by a search engine.

    The snapshot lies in `folder` unless `web.snapshot` names another. Pages come from public addresses only, and from
    the (host, port) pairs in `exempt`, which tests set for their own servers; no configuration key does. Raises
    UserError for a missing key. `find` raises BudgetSpent, UserError, and RunError if the snapshot cannot be written.
    """

    def __init__(
        self, web: WebConfig, folder: Path, limits: FetchLimits = LIMITS, exempt: Collection[HostPort] = ()
    ) -> None:
        self._web, self._snapshot = web, Snapshot(Path(web.snapshot).expanduser() if web.snapshot else folder)
        budget = RequestBudget(self._snapshot.folder / BUDGET, web.max_requests, section="web")
        self._engine = SearchEngine(web, budget)
        self._fetcher, self._extractor = Fetcher(limits, exempt), Extractor()

    def find(self, question: str) -> FoundEvidence:
        """Return the passages for a question, and counts of failures."""
        failures: Counter[str] = Counter()
        search = self._search(question)
        if search["refusal"]:
            failures[f"engine_{search['refusal']}"] += 1
        elif not search["results"]:
            failures["no_results"] += 1
        pages = list(self._texts(search["results"], failures))
        return nearest_passages(question, pages, MAX_PASSAGES, failures)

    def close(self) -> None:
        self._extractor.close()

    def _search(self, question: str) -> dict[str, Any]:
        """Return `results`, and `refusal`, the reason for a missing answer, else None."""
        most = self._web.num_results
        request = {"engine": self._engine.identity, "query": question, "num_results": most}
        if known := self._snapshot.read(("searches", "refused_searches"), request):
            return known
        results: list[Entry] = []
        refusal = None
        try:
            results = self._engine.search(question, most)
        except EngineRefused as refused:
            refusal = refused.reason
        search = {**request, "asked": _today(), "results": results, "refusal": refusal}
        self._snapshot.write("refused_searches" if refusal else "searches", request, search)
        return search

    def _texts(self, results: Sequence[Entry], failures: Counter[str]) -> Iterator[Passage]:
        """Yield whole pages with a text, in the engine's order; each URL and each text once."""
        seen: set[str] = set()
        for result, page in zip(results, self.read([result["url"] for result in results]), strict=True):
            if page.failure:
                failures[page.failure] += 1
                continue
            if {page.final_url, page.text} & seen:
                failures["duplicate"] += 1
                continue
            seen |= {page.final_url, page.text}
            title = result["title"] or page.title
            yield Passage(page.text, page.final_url, title, page.fetched or None, result["rank"], 0.0, 0.0)

    def read(self, urls: Sequence[str]) -> list[KeptPage]:
        """Return a page for each URL, in order; each page is saved as soon as it is read."""
        kept = {url: self._snapshot.read(("pages", "failed_pages"), {"url": url}) for url in urls}
        pages = {url: KeptPage(**entry) for url, entry in kept.items() if entry is not None}
        missing = [url for url in kept if url not in pages]
        if missing:
            pages |= zip(missing, asyncio.run(self._read_all(missing)), strict=True)
        return [pages[url] for url in urls]

    async def _read_all(self, urls: Sequence[str]) -> list[KeptPage]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        extracting = asyncio.Lock()  # pages wait here, leaving the threads to DNS look-ups
        async with self._fetcher.session():
            return await asyncio.gather(*(self._read(url, extracting) for url in urls))

    async def _read(self, url: str, extracting: asyncio.Lock) -> KeptPage:
        page = KeptPage(url=url, fetched=_today())
        try:
            downloaded = await self._fetcher.fetch(url)
            async with extracting:
                page = await asyncio.to_thread(self._with_text, page, downloaded)
        except FetchFailed as failure:
            page = replace(page, failure=failure.reason)
        self._snapshot.write("failed_pages" if page.failure else "pages", {"url": url}, asdict(page))
        return page

    def _with_text(self, page: KeptPage, downloaded: Downloaded) -> KeptPage:
        text, title = decode_page(downloaded.body, downloaded.content_type), ""
        if not downloaded.content_type.lower().startswith("text/plain"):
            text, title = self._extractor.extract(text)
        elif not text.strip():
            raise FetchFailed("no_text")
        return replace(page, final_url=downloaded.url, title=" ".join(title.split()), text=text)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
