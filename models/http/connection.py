"""One exchange with an HTTP server, and when it is tried again.

Servers throttle, time out, break off and answer nonsense. What may pass is a `ServerFault` and is tried
again, `max_attempts` times, after a random and growing wait or the one that the server asks for; what will
come again is a `ServerError` at once, with the server's own words. No wait is without a bound. The key
travels in a header and is shown nowhere, not even where the server quotes it.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from replug.configs.errors import RunError, UserError
from replug.models.http.completions_api import IllFormed, ServerFault

T = TypeVar("T")

CONNECTIONS_PER_CLIENT = 4
SECONDS_TO_CONNECT = 15.0
SECONDS_TO_LIST_MODELS = 30.0  # which needs no computing
BACKOFF_SECONDS = 0.5  # the longest first wait before a request is tried again; doubled each time
LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_MESSAGE = 300  # characters of a server's own words


class ServerError(RunError):
    """The server refused a request, or answered it well in none of its attempts; its cause is the last fault."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How many inputs a request holds, how many requests are open at once, and how long each is tried."""

    max_concurrency: int = 16
    prompts_per_request: int = 4
    timeout_seconds: float = 600.0
    max_attempts: int = 5


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Which server, and how to ask it; here and in the limits, the values of the keys under `lm` of the same names.

    `api_key` comes from the environment variable named `api_key_env`.
    """

    url: str
    model: str
    api: str = "echo"
    tokenizer: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_env: str = "REPLUG_LM_API_KEY"
    limits: RequestLimits = RequestLimits()

    def __post_init__(self) -> None:
        require_header_value(self.api_key or "", self.api_key_env)
        if self.api == "prompt_logprobs" and not self.tokenizer:
            raise UserError("lm.tokenizer is missing; lm.api=prompt_logprobs sends token ids")


class ServerConnection:
    """Connections to `spec.url` that stay open, for at most `max_concurrency` exchanges at once.

    `on_retry` is called before each further attempt.
    """

    def __init__(self, spec: ServerSpec, on_retry: Callable[[], None]) -> None:
        self._spec, self._on_retry = spec, on_retry
        self._clients = _clients(spec)
        self._free = [client for client in self._clients for _ in range(CONNECTIONS_PER_CLIENT)]

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def retrying(self, what: str, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the first attempt without a ServerFault returns. Raises ServerError, which says `what` was asked."""
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._spec.limits.max_attempts),
            wait=self._seconds_to_wait,
            retry=retry_if_exception_type(ServerFault),
            before_sleep=lambda state: self._on_retry(),
            reraise=True,
        )
        try:
            return await attempts(attempt)
        except ServerFault as fault:
            tried = f"in {self._spec.limits.max_attempts} attempts"
            raise ServerError(f"{self._spec.url} did not answer {what} {tried}; last: {fault}") from fault

    async def exchange(self, method: str, path: str, payload: dict[str, Any] | None = None) -> Any:
        """The answer's JSON. Raises ServerFault for what may pass and ServerError for what will not."""
        client = self._free.pop()  # of which there are as many as the caller opens exchanges
        patience = self._spec.limits.timeout_seconds
        seconds = patience if payload else min(patience, SECONDS_TO_LIST_MODELS)
        try:
            # httpx has time-outs for each read only: an answer that drips would never end.
            async with asyncio.timeout(seconds):
                response = await client.request(method, self._spec.url.rstrip("/") + path, json=payload)
        except TimeoutError as error:
            raise ServerFault(f"no answer within {seconds:g} s") from error
        except httpx.RequestError as error:
            unread = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise ServerFault(f"{type(error).__name__}: {error}", unread=unread) from error
        finally:
            self._free.append(client)
        if response.status_code != httpx.codes.OK:
            raise self._refusal(response, payload)
        try:
            return response.json()
        except ValueError as error:
            raise IllFormed("the answer is not JSON") from error

    def _seconds_to_wait(self, state: RetryCallState) -> float:
        backoff = wait_random_exponential(multiplier=BACKOFF_SECONDS, max=LONGEST_BACKOFF_SECONDS)(state)
        fault = state.outcome.exception() if state.outcome else None
        asked_for = fault.retry_after if isinstance(fault, ServerFault) else 0.0
        return backoff + min(asked_for, self._spec.limits.timeout_seconds)

    def _refusal(self, response: httpx.Response, payload: dict[str, Any] | None) -> Exception:
        status = response.status_code
        said = f"{status} {response.reason_phrase}: {servers_words(response, self._spec.api_key)}"
        if status in (408, 429) or status >= 500:
            return ServerFault(said, retry_after(response), unread=status == 429)
        return ServerError(f"{self._spec.url} refuses the request: {said}{self._hint(status, payload)}")

    def _hint(self, status: int, payload: dict[str, Any] | None) -> str:
        if status in (401, 403):
            return f"; expected its key in the environment variable {self._spec.api_key_env}"
        if status == 404:
            return "; expected lm.url to be such as http://HOST:PORT/v1"
        lengths = [len(prompt) for prompt in (payload or {}).get("prompt", []) if isinstance(prompt, list)]
        return f"; the longest input of the request has {max(lengths)} tokens" if lengths else ""


def _clients(spec: ServerSpec) -> list[httpx.AsyncClient]:
    """Several, since httpx looks at all pairs of a client's connections for each request that it sends."""
    trust_env = not is_loopback(httpx.URL(spec.url).host)  # no proxy reaches this machine's own servers
    certificates = httpx.create_ssl_context(trust_env=trust_env)  # slow to read, so shared
    return [
        httpx.AsyncClient(
            headers={"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {},
            limits=httpx.Limits(max_connections=CONNECTIONS_PER_CLIENT),
            timeout=httpx.Timeout(None, connect=SECONDS_TO_CONNECT),  # `exchange` bounds the whole
            trust_env=trust_env,
            verify=certificates,
        )
        for _ in range(0, spec.limits.max_concurrency, CONNECTIONS_PER_CLIENT)
    ]


def require_header_value(key: str, variable: str) -> None:
    """Raise UserError for a key that no header can hold: an HTTP library's own error would quote it."""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"the key in ${variable} has white space or characters that no header may hold")


def servers_words(response: httpx.Response, secret: str | None) -> str:
    """The server's own words on one short line, without the secret, which it may quote."""
    said = " ".join(_message(response).split())
    if secret:
        said = said.replace(secret, "***")
    return said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]} ..."


def _message(response: httpx.Response) -> str:
    """The message of an error, whose place differs between servers."""
    try:
        body = response.json()
    except ValueError:
        return response.text
    error = body.get("error", body) if isinstance(body, dict) else body
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return str(message or body)


def retry_after(response: httpx.Response) -> float:
    """Seconds, from seconds or an HTTP date; 0 where the header is missing or makes no sense."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without its time zone
        return 0.0


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
