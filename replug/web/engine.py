"""Search engines: `make_engine` makes the one that `web.engine` names.

An engine returns a limited number of results for a request, so further pages are requested until there are enough.

The address of an engine is the user's choice, so it is not guarded as a page's is. The answer is still not trusted:
its time and bytes are bounded, redirects are not followed, so that a key goes to no other host, and an answer of
another form is a refusal with a reason.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.config.rules import is_loopback
from replug.models.http.connection import ServerFault, require_header_value, retry_after, servers_words
from replug.models.http.request_budget import RequestBudget
from replug.web.extraction import ACCEPTED, FetchFailed, unpacked
from replug.web.records import EngineRefused, EngineResult

SECONDS, MAX_BYTES, MAX_ATTEMPTS = 30.0, 8 * 2**20, 4  # of one answer
BACKOFF_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0  # an engine that asks for a longer wait has refused
Entry = dict[str, Any]  # with `url` and `title`, as an engine gives it


class ApiEngine(ABC):
    """An engine with a JSON API. A subclass says where it is, what to ask for, and where an answer has its results."""

    url: str
    identity: str  # the engine with its settings, without secrets; part of the keys that answers are kept under
    refused: str  # what a user can do about 401 and 403
    key_header = ""  # an engine with a key has it in a header, so that no URL holds it
    pause_seconds = 0.0  # between two requests
    page_size, max_pages = 1, 1
    path: tuple[str, ...]  # of the list of results in an answer

    def __init__(self, web: WebConfig, budget: RequestBudget) -> None:
        self._web, self._budget, self._next_turn = web, budget, 0.0
        self._key = _key(web) if self.key_header else None
        self._trust_env = not is_loopback(urlsplit(self.url).hostname or "")
        self._certificates = httpx.create_ssl_context(trust_env=self._trust_env)  # slow to read

    @abstractmethod
    def parameters(self, query: str, num_results: int, page: int) -> dict[str, str | int]:
        """Return the parameters of the request for a page of results, numbered from 0."""

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        """Return at most `num_results`, in the engine's order. Raises EngineRefused, BudgetSpent and UserError."""
        entries: list[Entry] = []
        for page in range(min(self.max_pages, -(-num_results // self.page_size))):
            body = self._get(self.parameters(query, num_results, page))
            listed, before = entries_at(body, *self.path), len(ranked(entries, num_results))
            entries += listed
            if len(listed) < self.page_size or len(ranked(entries, num_results)) in (before, num_results):
                break
        if not entries and body.get("unresponsive_engines"):  # SearXNG's own engines
            raise EngineRefused("engines_unresponsive", str(body["unresponsive_engines"])[:200])
        return ranked(entries, num_results)

    def _get(self, parameters: Mapping[str, str | int]) -> Any:
        """Ask again where that may help. Raises EngineRefused, BudgetSpent, and UserError for 401 and 403."""
        attempts = Retrying(
            stop=stop_after_attempt(MAX_ATTEMPTS),
            wait=_seconds_to_wait,
            retry=retry_if_exception_type(ServerFault),
            reraise=True,
        )
        try:
            return attempts(self._request, parameters)
        except ServerFault as fault:
            raise EngineRefused("rate_limited" if fault.unread else "failed", str(fault)) from fault

    def _request(self, parameters: Mapping[str, str | int]) -> Any:
        time.sleep(max(0.0, self._next_turn - time.monotonic()))
        self._next_turn = time.monotonic() + self.pause_seconds
        self._budget.reserve(0)
        self._budget.settle(0, 0)
        try:
            response = asyncio.run(self._exchange(parameters))
        except TimeoutError as error:
            raise ServerFault(f"no answer within {SECONDS:g} s") from error
        except httpx.RequestError as error:
            raise ServerFault(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        reason = f"{status}: {servers_words(response, self._key)}"
        if status in (401, 403):
            where = f" {self._web.api_key_env}" if self._key else ""
            raise UserError(f"{self.url} refuses the search ({reason}); {self.refused}{where}")
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
        headers = {"Accept-Encoding": ACCEPTED, **({self.key_header: self._key} if self._key else {})}
        async with (
            asyncio.timeout(SECONDS),
            httpx.AsyncClient(
                headers=headers, trust_env=self._trust_env, verify=self._certificates, timeout=None
            ) as client,
            client.stream("GET", self.url, params=dict(parameters)) as response,
        ):
            content = bytearray()
            async for piece in response.aiter_raw(2**16):  # httpx would unpack all of a piece at once
                content += piece
                if len(content) > MAX_BYTES:
                    raise EngineRefused("ill_formed", f"an answer of more than {MAX_BYTES} bytes")
            try:
                body = unpacked(bytes(content), response.headers.get("Content-Encoding", ""), MAX_BYTES)
            except FetchFailed as error:
                raise EngineRefused("ill_formed", f"an answer that cannot be unpacked ({error})") from error
            kept = [(k, v) for k, v in response.headers.items() if k in ("content-type", "retry-after")]
            return httpx.Response(response.status_code, headers=kept, content=body)


class SearxngEngine(ApiEngine):
    """SearXNG, self-hosted: https://docs.searxng.org/dev/search_api.html

    A page holds what its own engines gave, some ten to thirty results.
    """

    refused = (
        "a SearXNG gives JSON only where its settings.yml allows it: expected `search: formats: [html, json]` "
        "there, and a limiter that lets this machine through"
    )
    max_pages = 3
    path = ("results",)

    def __init__(self, web: WebConfig, budget: RequestBudget) -> None:
        server = str(web.url).rstrip("/")
        self.url = f"{server}/search"
        self.identity = f"searxng {server}"
        super().__init__(web, budget)

    def parameters(self, query: str, num_results: int, page: int) -> dict[str, str | int]:
        return {"q": query, "format": "json", "pageno": page + 1}


class BraveEngine(ApiEngine):
    """Brave Search: https://api-dashboard.search.brave.com/app/documentation/web-search"""

    url = "https://api.search.brave.com/res/v1/web/search"
    refused = "expected a key of its Web Search in the environment variable"
    key_header = "X-Subscription-Token"
    pause_seconds = 1.0
    page_size, max_pages = 20, 10  # it takes no further offset
    path, identity = ("web", "results"), "brave"

    def parameters(self, query: str, num_results: int, page: int) -> dict[str, str | int]:
        count = min(self.page_size, num_results)
        return {"q": query, "count": count, "offset": page}


ENGINES: dict[str, type[BraveEngine | SearxngEngine]] = {"brave": BraveEngine, "searxng": SearxngEngine}


def make_engine(web: WebConfig, budget: RequestBudget) -> ApiEngine:
    """Return the engine. Raises UserError for a name of no engine of the web, and for a missing key."""
    if web.engine not in ENGINES:
        raise UserError(f"web.engine is {web.engine}; expected {' or '.join(ENGINES)}; local searches a corpus")
    return ENGINES[web.engine](web, budget)


def _seconds_to_wait(state: RetryCallState) -> float:
    fault = state.outcome.exception() if state.outcome else None
    asked_for = fault.retry_after if isinstance(fault, ServerFault) else 0.0
    return max(asked_for, wait_exponential(BACKOFF_SECONDS, max=LONGEST_WAIT_SECONDS)(state))


def _key(web: WebConfig) -> str:
    """Return the engine's key from the environment. Raises UserError if it is missing or cannot be sent."""
    key = os.environ.get(web.api_key_env, "")
    if not key:
        raise UserError(
            f"web.engine={web.engine} needs a key; expected it in the environment variable {web.api_key_env}"
        )
    require_header_value(key, web.api_key_env)
    return key


def entries_at(body: Any, *path: str) -> list[Entry]:
    """Return the objects of a list in an answer; none if an object on the way, or the list, is missing.

    Raises EngineRefused for an answer of another form.
    """
    for name in path:
        if not isinstance(body, dict):
            raise EngineRefused("ill_formed", "the answer is not an object")
        body = body.get(name)
        if body is None:
            return []
    if not isinstance(body, list):
        raise EngineRefused("ill_formed", f"{'.'.join(path)} is not a list")
    return [entry for entry in body if isinstance(entry, dict)]


def ranked(entries: Iterable[Entry], num_results: int) -> list[EngineResult]:
    """Return results in the engine's order, each URL once; entries without a URL of the web are left out."""
    by_url: dict[str, EngineResult] = {}
    for entry in entries:
        url: Any = entry.get("url")
        is_of_web = isinstance(url, str) and url.startswith(("http://", "https://"))
        if is_of_web and url not in by_url and len(by_url) < num_results:
            by_url[url] = EngineResult(url, str(entry.get("title") or ""), len(by_url) + 1)
    return list(by_url.values())
