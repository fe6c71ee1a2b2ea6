"""Search engines with a JSON API: SearXNG, self-hosted, and Brave Search.

    https://docs.searxng.org/dev/search_api.html
    https://api-dashboard.search.brave.com/app/documentation/web-search

An engine limits the results of a request, so further pages are requested until there are enough: a page of SearXNG
holds the ten to thirty results of its own engines.

The user chooses the address of an engine, so it is not guarded like a page's. The response is still untrusted: its time
and bytes are bounded, redirects are not followed, so that no other host receives the key, and a malformed response
counts as a refusal with a reason.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.config.rules import is_loopback
from replug.models.http.connection import ServerFault, require_header_value, retry_after, servers_words
from replug.models.http.request_budget import RequestBudget
from replug.web.extraction import ACCEPTED, FetchFailed, unpacked

SECONDS, MAX_BYTES, MAX_ATTEMPTS = 30.0, 8 * 2**20, 4  # of one answer
BACKOFF_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0  # a longer Retry-After counts as a refusal
SEARXNG, BRAVE = "searxng", "brave"
BRAVE_URL = "https://api.search.brave.com/res/v1/web/search"
API_KEY = "REPLUG_SEARCH_API_KEY"  # the environment variable with the key of brave
REFUSED = {  # the remedies for 401 and 403
    SEARXNG: "a SearXNG gives JSON only where its settings.yml allows it: expected `search: formats: [html, json]` "
    "there, and a limiter that lets this machine through",
    BRAVE: f"expected a key of its Web Search in the environment variable {API_KEY}",
}
PATHS = {SEARXNG: ("results",), BRAVE: ("web", "results")}  # to the list of results in a response
Entry = dict[str, Any]  # with `url` and `title`, as an engine gives it; with `rank`, from 1, in results


class EngineRefused(Exception):
    """An engine did not answer a query; `reason` is a short name to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SearchEngine:
    """The web search engine that `web.engine` names. Raises UserError for any other name and for a missing key.

    `identity` names it with its settings and without secrets; it is part of the snapshot's keys.
    """

    def __init__(self, web: WebConfig, budget: RequestBudget) -> None:
        self._engine, self._budget = web.engine, budget
        self._page_size, self._max_pages = 1, 3
        self._headers = {"Accept-Encoding": ACCEPTED}
        self._key: str | None = None
        if web.engine == SEARXNG:
            server = str(web.url).rstrip("/")
            self.url, self.identity = f"{server}/search", f"searxng {server}"
        elif web.engine == BRAVE:
            self.url, self.identity, self._key = BRAVE_URL, BRAVE, os.environ.get(API_KEY, "")
            if not self._key:
                raise UserError(f"web.engine={BRAVE} needs a key; expected it in the environment variable {API_KEY}")
            require_header_value(self._key, API_KEY)
            self._page_size, self._max_pages = 20, 10  # the largest offset is 9
            self._headers["X-Subscription-Token"] = self._key  # a header keeps it out of URLs
        else:
            raise UserError(f"web.engine is {web.engine}; expected {BRAVE} or {SEARXNG}; local searches a corpus")
        self._trust_env = not is_loopback(urlsplit(self.url).hostname or "")
        self._certificates = httpx.create_ssl_context(trust_env=self._trust_env)  # slow to read

    def search(self, query: str, num_results: int) -> list[Entry]:
        """Return at most `num_results`, in the engine's order. Raises EngineRefused, BudgetSpent and UserError."""
        entries: list[Entry] = []
        for page in range(min(self._max_pages, -(-num_results // self._page_size))):
            body = self._get(self._parameters(query, num_results, page))
            listed, before = entries_at(body, *PATHS[self._engine]), len(ranked(entries, num_results))
            entries += listed
            if len(listed) < self._page_size or len(ranked(entries, num_results)) in (before, num_results):
                break
        if not entries and body.get("unresponsive_engines"):  # SearXNG's own engines
            raise EngineRefused("engines_unresponsive", str(body["unresponsive_engines"])[:200])
        return ranked(entries, num_results)

    def _parameters(self, query: str, num_results: int, page: int) -> dict[str, str | int]:
        """Return the parameters of the request for a page of results, numbered from 0."""
        if self._engine == SEARXNG:
            return {"q": query, "format": "json", "pageno": page + 1}
        return {"q": query, "count": min(self._page_size, num_results), "offset": page}

    def _get(self, parameters: Mapping[str, str | int]) -> Any:
        """Return the parsed response, with retries. Raises EngineRefused, BudgetSpent, UserError for 401 and 403."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._request(parameters)
            except ServerFault as fault:
                if attempt == MAX_ATTEMPTS:
                    raise EngineRefused("rate_limited" if fault.unread else "failed", str(fault)) from fault
                time.sleep(max(fault.retry_after, BACKOFF_SECONDS * 2 ** (attempt - 1)))
        raise AssertionError

    def _request(self, parameters: Mapping[str, str | int]) -> Any:
        self._budget.reserve(0)
        self._budget.settle(0, 0)
        try:
            response = asyncio.run(self._exchange(parameters))
        except (TimeoutError, httpx.RequestError) as error:
            raise ServerFault(f"no answer within {SECONDS:g} s: {type(error).__name__} {error}") from error
        status = response.status_code
        reason = f"{status}: {servers_words(response, self._key)}"
        if status in (401, 403):
            raise UserError(f"{self.url} refuses the search ({reason}); {REFUSED[self._engine]}")
        if status in (408, 429) or status >= 500:
            if (seconds := retry_after(response)) > LONGEST_WAIT_SECONDS:
                raise EngineRefused("rate_limited", f"it asks to wait {seconds:g} s; {reason}")
            raise ServerFault(reason, seconds, unread=status == 429)
        if status != httpx.codes.OK:
            raise EngineRefused(f"status_{status}", reason)
        try:
            return response.json()
        except (ValueError, RecursionError) as error:  # RecursionError: brackets thousands deep
            raise EngineRefused("ill_formed", "the answer is not JSON") from error

    async def _exchange(self, parameters: Mapping[str, str | int]) -> httpx.Response:
        async with (
            asyncio.timeout(SECONDS),
            httpx.AsyncClient(
                headers=self._headers, trust_env=self._trust_env, verify=self._certificates, timeout=None
            ) as client,
            client.stream("GET", self.url, params=dict(parameters)) as response,
        ):
            content = bytearray()
            async for piece in response.aiter_raw(2**16):  # httpx would unpack a whole piece at once
                content += piece
                if len(content) > MAX_BYTES:
                    raise EngineRefused("ill_formed", f"an answer of more than {MAX_BYTES} bytes")
            try:
                body = unpacked(bytes(content), response.headers.get("Content-Encoding", ""), MAX_BYTES)
            except FetchFailed as error:
                raise EngineRefused("ill_formed", f"an answer that cannot be unpacked ({error})") from error
            kept = [(k, v) for k, v in response.headers.items() if k in ("content-type", "retry-after")]
            return httpx.Response(response.status_code, headers=kept, content=body)


def entries_at(body: Any, *path: str) -> list[Entry]:
    """Return the objects of the list at `path` in a response; none if any part of the path is missing.

    Raises EngineRefused for a malformed response.
    """
    for name in path:
        if not isinstance(body, dict):
            raise EngineRefused("ill_formed", "the answer is not an object")
        body = body.get(name) or ([] if name == path[-1] else {})
    if not isinstance(body, list):
        raise EngineRefused("ill_formed", f"{'.'.join(path)} is not a list")
    return [entry for entry in body if isinstance(entry, dict)]


def ranked(entries: Iterable[Entry], num_results: int) -> list[Entry]:
    """Return results in the engine's order, each URL once; entries without an HTTP URL are left out."""
    by_url: dict[str, Entry] = {}
    for entry in entries:
        url: Any = entry.get("url")
        is_of_web = isinstance(url, str) and url.startswith(("http://", "https://"))
        if is_of_web and url not in by_url and len(by_url) < num_results:
            by_url[url] = {"url": url, "title": str(entry.get("title") or ""), "rank": len(by_url) + 1}
    return list(by_url.values())
