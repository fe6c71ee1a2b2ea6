"""One request to a search engine's JSON API: within the budget, not too often, tried again where that may help.

An engine is the user's choice, so its address is not guarded as a page's is; it may be on this machine. It is still not
believed: time and bytes of an answer are bounded, redirects are not followed, so that a key goes to no other host, and
what is not of the expected form is a refusal with a reason.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential

from replug.config.errors import UserError
from replug.config.evaluation_schema import WebConfig
from replug.models.http.connection import ServerFault, is_loopback, require_header_value, retry_after, servers_words
from replug.models.http.request_budget import RequestBudget
from replug.web.records import EngineRefused, EngineResult


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """A Retry-After longer than `longest_wait_seconds` is not waited for: the engine counts as having refused."""

    requests_per_second: float = 1.0
    seconds: float = 30.0
    max_bytes: int = 8 * 2**20
    max_attempts: int = 4
    backoff_seconds: float = 1.0
    longest_wait_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class ApiAddress:
    """`secret` goes into the header `secret_header`; `refused` says what a user can do about 401 and 403."""

    url: str
    refused: str
    secret: str | None = field(default=None, repr=False)
    secret_header: str = ""


class RequestPace:
    """At most so many requests a second; a wait for each but the first."""

    def __init__(self, per_second: float) -> None:
        self._seconds, self._next = 1.0 / per_second, 0.0

    async def turn(self) -> None:
        await asyncio.sleep(self._next - time.monotonic())
        self._next = time.monotonic() + self._seconds


class SearchApi:
    """Answers of one engine as JSON. Raises EngineRefused, BudgetSpent, and UserError for 401 and 403."""

    def __init__(self, address: ApiAddress, budget: RequestBudget, limits: SearchLimits) -> None:
        self._address, self._budget, self._limits = address, budget, limits
        self._pace = RequestPace(limits.requests_per_second)
        self._trust_env = not is_loopback(urlsplit(address.url).hostname or "")
        self._certificates = httpx.create_ssl_context(trust_env=self._trust_env)  # slow to read
        self._headers = {address.secret_header: address.secret} if address.secret else {}

    def get(self, parameters: Mapping[str, str | int]) -> Any:
        return asyncio.run(self._retrying(parameters))

    async def _retrying(self, parameters: Mapping[str, str | int]) -> Any:
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._limits.max_attempts),
            wait=self._seconds_to_wait,
            retry=retry_if_exception_type(ServerFault),
            reraise=True,
        )
        try:
            return await attempts(self._request, parameters)
        except ServerFault as fault:
            raise EngineRefused("rate_limited" if fault.unread else "failed", str(fault)) from fault

    async def _request(self, parameters: Mapping[str, str | int]) -> Any:
        await self._pace.turn()
        self._budget.reserve(0)
        try:
            async with asyncio.timeout(self._limits.seconds):
                response = await self._exchange(parameters)
        except TimeoutError as error:
            raise ServerFault(f"no answer within {self._limits.seconds:g} s") from error
        except httpx.RequestError as error:
            raise ServerFault(f"{type(error).__name__}: {error}") from error
        finally:
            self._budget.settle(0, 0)
        return self._json(response)

    async def _exchange(self, parameters: Mapping[str, str | int]) -> httpx.Response:
        async with (
            httpx.AsyncClient(
                headers=self._headers, trust_env=self._trust_env, verify=self._certificates, timeout=None
            ) as client,
            client.stream("GET", self._address.url, params=dict(parameters)) as response,
        ):
            content = bytearray()
            async for piece in response.aiter_bytes(2**16):
                content += piece
                if len(content) > self._limits.max_bytes:
                    raise EngineRefused("ill_formed", f"an answer of more than {self._limits.max_bytes} bytes")
            # Its bytes are unpacked, so that nothing is to be said of a coding.
            kept = [(k, v) for k, v in response.headers.items() if k in ("content-type", "retry-after")]
            return httpx.Response(response.status_code, headers=kept, content=bytes(content))

    def _json(self, response: httpx.Response) -> Any:
        status = response.status_code
        said = f"{status}: {servers_words(response, self._address.secret)}"
        if status in (401, 403):
            raise UserError(f"{self._address.url} refuses the search ({said}); {self._address.refused}")
        if status in (408, 429) or status >= 500:
            self._check_wait(retry_after(response), said)
            raise ServerFault(said, retry_after(response), unread=status == 429)
        if status != httpx.codes.OK:
            raise EngineRefused(f"status_{status}", said)
        try:
            return response.json()
        except (ValueError, RecursionError) as error:  # RecursionError: brackets thousands deep
            raise EngineRefused("ill_formed", "the answer is not JSON") from error

    def _check_wait(self, seconds: float, said: str) -> None:
        if seconds > self._limits.longest_wait_seconds:
            raise EngineRefused("rate_limited", f"it asks to wait {seconds:g} s; {said}")

    def _seconds_to_wait(self, state: RetryCallState) -> float:
        fault = state.outcome.exception() if state.outcome else None
        asked_for = fault.retry_after if isinstance(fault, ServerFault) else 0.0
        backoff = wait_exponential(self._limits.backoff_seconds, max=self._limits.longest_wait_seconds)(state)
        return max(asked_for, backoff)


def search_limits(web: WebConfig) -> SearchLimits:
    return SearchLimits(requests_per_second=web.requests_per_second)


def required_key(web: WebConfig) -> str:
    """The engine's key from the environment. Raises UserError where it is not there."""
    key = os.environ.get(web.api_key_env, "")
    if not key:
        raise UserError(
            f"web.engine={web.engine} wants a key; expected it in the environment variable {web.api_key_env}"
        )
    require_header_value(key, web.api_key_env)
    return key


def entries_at(body: Any, *path: str) -> list[dict[str, Any]]:
    """The objects of a list in an answer; none where an object on the way, or the list, is not there.

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


def ranked(entries: list[tuple[Any, Any, Any]], num_results: int) -> list[EngineResult]:
    """Results from (URL, title, date) in an engine's order, each URL once; what has no URL of the web is left out."""
    by_url: dict[str, EngineResult] = {}
    for url, title, day in entries:
        is_of_web = isinstance(url, str) and url.startswith(("http://", "https://"))
        if is_of_web and url not in by_url and len(by_url) < num_results:
            by_url[url] = EngineResult(url, str(title or ""), len(by_url) + 1, published=iso_day(day))
    return list(by_url.values())


def iso_day(value: Any) -> str | None:
    """The date that an ISO time begins with, None for anything else."""
    text = value[:10] if isinstance(value, str) else ""
    try:
        return time.strftime("%Y-%m-%d", time.strptime(text, "%Y-%m-%d"))
    except ValueError:
        return None


def query_of(web: WebConfig, query: str) -> str:
    """With the site, in the operator that engines have for it."""
    return f"{query} site:{web.site}" if web.site else query
