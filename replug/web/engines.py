"""Search engines: `make_engine` makes the one that `web.engine` names.

An engine gives at most so many results for a request, so it is asked for further pages until there are enough. Where an
engine can limit by date, it is asked to; the dates of results and pages decide all the same, so that a page whose date
nobody gives is not used with `web.before`.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import date, timedelta

from replug.config.errors import UserError, require_extra
from replug.config.evaluation_schema import WebConfig
from replug.data.records import Document
from replug.index_workers.bm25 import BM25Index
from replug.models.ensemble import Retrieved, Retriever
from replug.models.http.request_budget import RequestBudget
from replug.web.records import ENGINE_NAMES, EngineRefused, EngineResult, SearchEngine
from replug.web.search_api import (
    ApiAddress,
    RequestPace,
    SearchApi,
    entries_at,
    query_of,
    ranked,
    required_key,
    search_limits,
)

SEARXNG_PAGES = 3
BRAVE_URL = "https://api.search.brave.com/res/v1/web/search"
BRAVE_RESULTS, BRAVE_PAGES = 20, 10  # of one request, and of one query: it takes no further offset
GOOGLE_URL = "https://customsearch.googleapis.com/customsearch/v1"
GOOGLE_RESULTS, GOOGLE_MAX_RESULTS = 10, 100  # of one request, and of one query
DDGS_SECONDS = 20
FIRST_DAY = date(1990, 1, 1)


def make_engine(web: WebConfig, budget: RequestBudget, local: SearchEngine | None) -> SearchEngine:
    """Return the engine. `local` is one over documents that the caller has, None if it has none.

    Raises UserError for an unknown name, and for what an engine lacks.
    """
    if web.engine == "local":
        if local is None:
            raise UserError(
                "web.engine=local searches documents, and there are none; expected a corpus or another engine"
            )
        return local
    if web.engine not in ENGINES:
        raise UserError(f"web.engine is {web.engine}; expected one of: {', '.join(ENGINE_NAMES)}")
    return ENGINES[web.engine](web, budget)


class SearxngEngine:
    """SearXNG, self-hosted: https://docs.searxng.org/dev/search_api.html

    It has no limit by date. A page of its answer holds what its engines gave, some ten to thirty results.
    """

    def __init__(self, web: WebConfig, budget: RequestBudget) -> None:
        self._web, url = web, str(web.url).rstrip("/")
        refused = (
            "a SearXNG gives JSON only where its settings.yml allows it: expected `search: formats: [html, json]` "
            "there, and a limiter that lets this machine through"
        )
        self._api = SearchApi(ApiAddress(f"{url}/search", refused), budget, search_limits(web))
        self.identity = f"searxng {url}" + (f" site:{web.site}" if web.site else "")

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        """Raises EngineRefused where none of its own engines answered."""
        entries: list[tuple] = []
        for page in range(1, SEARXNG_PAGES + 1):
            body = self._api.get({"q": query_of(self._web, query), "format": "json", "pageno": page})
            found, before = entries_at(body, "results"), len(ranked(entries, num_results))
            entries += [(entry.get("url"), entry.get("title"), entry.get("publishedDate")) for entry in found]
            if len(ranked(entries, num_results)) in (before, num_results):  # nothing new, or enough
                break
        if not entries and isinstance(body, dict) and body.get("unresponsive_engines"):
            raise EngineRefused("engines_unresponsive", str(body["unresponsive_engines"])[:200])
        return ranked(entries, num_results)


class BraveEngine:
    """Brave Search: https://api-dashboard.search.brave.com/app/documentation/web-search"""

    def __init__(self, web: WebConfig, budget: RequestBudget, url: str = BRAVE_URL) -> None:
        self._web = web
        refused = f"expected a key of its Web Search in the environment variable {web.api_key_env}"
        address = ApiAddress(url, refused, required_key(web), "X-Subscription-Token")
        self._api = SearchApi(address, budget, search_limits(web))
        self.identity = f"brave site:{web.site} before:{web.before}"

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        asked: dict[str, str | int] = {"q": query_of(self._web, query), "count": min(BRAVE_RESULTS, num_results)}
        if self._web.before:
            asked["freshness"] = f"{FIRST_DAY.isoformat()}to{_day_before(self._web.before).isoformat()}"
        entries: list[tuple] = []
        for page in range(min(BRAVE_PAGES, -(-num_results // BRAVE_RESULTS))):
            found = entries_at(self._api.get({**asked, "offset": page}), "web", "results")
            entries += [(entry.get("url"), entry.get("title"), entry.get("page_age")) for entry in found]
            if len(found) < BRAVE_RESULTS:
                break
        return ranked(entries, num_results)


class GoogleEngine:
    """Google Programmable Search, closed to new customers: https://developers.google.com/custom-search/v1/reference

    Its key goes in a header, so that no URL holds it.
    """

    def __init__(self, web: WebConfig, budget: RequestBudget, url: str = GOOGLE_URL) -> None:
        self._web = web
        refused = f"expected a key of Programmable Search in ${web.api_key_env}, and its engine at web.google_cx"
        address = ApiAddress(url, refused, required_key(web), "X-Goog-Api-Key")
        self._api = SearchApi(address, budget, search_limits(web))
        self.identity = f"google {web.google_cx} site:{web.site} before:{web.before}"

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        asked: dict[str, str | int] = {"q": query, "cx": str(self._web.google_cx), "num": GOOGLE_RESULTS}
        if self._web.site:
            asked |= {"siteSearch": self._web.site, "siteSearchFilter": "i"}
        if self._web.before:
            asked["sort"] = f"date:r:{FIRST_DAY:%Y%m%d}:{_day_before(self._web.before):%Y%m%d}"
        entries: list[tuple] = []
        for start in range(0, min(GOOGLE_MAX_RESULTS, num_results), GOOGLE_RESULTS):
            found = entries_at(self._api.get({**asked, "start": start + 1}), "items")
            entries += [(entry.get("link"), entry.get("title"), None) for entry in found]
            if len(found) < GOOGLE_RESULTS:
                break
        return ranked(entries, num_results)


def _day_before(day: str) -> date:
    return date.fromisoformat(day) - timedelta(days=1)


class DdgsEngine:
    """Several public engines without a key, by the package `ddgs`, an extra: pip install "replug[ddgs]".

    It asks engines that offer no API, so it is slower, refused sooner, and in another order each time: a snapshot keeps
    what it gave. A search is one request of the budget, whatever the package sends for it. The user must know whether
    engines allow this.
    """

    def __init__(self, web: WebConfig, budget: RequestBudget) -> None:
        require_extra("ddgs", "ddgs", what="web.engine=ddgs")
        import ddgs.exceptions

        self._ddgs, self._web, self._budget = ddgs, web, budget
        self._pace = RequestPace(web.requests_per_second)
        self.identity = f"ddgs site:{web.site}"

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        asyncio.run(self._pace.turn())
        self._budget.reserve(0)
        try:
            found = self._ddgs.DDGS(timeout=DDGS_SECONDS).text(query_of(self._web, query), max_results=num_results)
        except self._ddgs.exceptions.RatelimitException as error:
            raise EngineRefused("rate_limited", str(error)) from error
        except self._ddgs.exceptions.DDGSException as error:
            if str(error) == "No results found.":  # what it raises for an empty answer
                return []
            raise EngineRefused("failed", str(error)) from error
        finally:
            self._budget.settle(0, 0)
        return ranked([(entry.get("href"), entry.get("title"), None) for entry in found], num_results)


ENGINES: dict[str, Callable[[WebConfig, RequestBudget], SearchEngine]] = {
    "brave": BraveEngine,
    "ddgs": DdgsEngine,
    "google": GoogleEngine,
    "searxng": SearxngEngine,
}


class BM25Retriever:
    """A `Retriever` over documents in memory. One that shares no word with a query is not found."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = list(documents)
        self._index = BM25Index(document.text for document in self._documents)
        digest = hashlib.sha256()
        for document in self._documents:
            digest.update(f"{len(document.id)} {len(document.text)} {document.id}{document.text}".encode())
        self.identity = f"bm25:{digest.hexdigest()[:16]}"

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Up to `k` documents for each query, best first; those of equal score by row."""
        answers = []
        for query in queries:
            rows, scores = self._index.search(query, k)
            best = sorted((-float(score), int(row)) for row, score in zip(rows, scores, strict=True) if score > 0)
            answers.append(
                [Retrieved(self._documents[row].text, -score, self._documents[row].id) for score, row in best]
            )
        return answers


class LocalEngine:
    """A `SearchEngine` over documents that the caller has: nothing is asked for or fetched.

    LocalEngine(BM25Retriever(documents))                 # lexical
    LocalEngine(IndexRetriever(LocalIndex(root, threads)))  # a published index, dense

    `titles` are those of documents by id, where they are known.

    `identity` says which documents and which retriever; a retriever that has one gives it.
    """

    def __init__(self, retriever: Retriever, identity: str = "", titles: dict[str, str] | None = None) -> None:
        self._retriever, self._titles = retriever, titles or {}
        self.identity = f"local {identity or getattr(retriever, 'identity', '')}".strip()

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        found = self._retriever.retrieve([query], num_results)[0]
        return [
            EngineResult(
                url=f"document:{one.id}",
                title=self._titles.get(one.id, ""),
                rank=rank,
                text=one.text,
                doc_id=one.id,
                similarity=one.similarity,
            )
            for rank, one in enumerate(found, 1)
        ]
