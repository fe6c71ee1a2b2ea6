"""One exchange with an HTTP server, and when it is tried again.

What may pass is a `ServerFault` and is tried again, `max_attempts` times, after a random and growing wait or the one
that the server asks for; what will come again is a `ServerError` at once, with the server's own words. Waits and
answers have bounds. The key travels in a header and is shown nowhere, not even where the server quotes it.
An answer that cannot be compared with its request comes on a connection of its own: on one that is kept, what a server
or a proxy had sent too much is taken for the answer to the next request.
"""

import asyncio
import ipaddress
import json
import os
import re
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from replug.config.errors import RunError, UserError
from replug.config.plain_text import plain_line
from replug.config.schema import LMConfig

T = TypeVar("T")

CONNECTIONS_PER_CLIENT = 4
SECONDS_TO_CONNECT = 15.0
SECONDS_TO_LIST_MODELS = 30.0  # which needs no computing
BACKOFF_SECONDS = 0.5  # the longest first wait before a request is tried again; doubled each time
LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_MESSAGE = 300  # characters of a server's own words
MOST_REFUSAL_BYTES = 1 << 16  # of an answer that is an error; the rest is left unread
MOST_LIST_BYTES = 4 << 20  # of the list of models


class ServerFault(Exception):
    """Something that may not happen again. `unread`: the server did not look at the request, which so cost nothing."""

    def __init__(self, message: str, retry_after: float = 0.0, unread: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.unread = retry_after, unread


class IllFormed(ServerFault):
    """An answer that does not have the shape, or the numbers, that were asked for."""


class ServerError(RunError):
    """The server refused a request, or answered it well in none of its attempts; its cause is the last fault."""


class ServerConnection:
    """Connections to `lm.url` that stay open, for at most `max_concurrency` exchanges at once.

    `on_retry` is called before each further attempt. Raises UserError for a key that no header can hold.
    """

    def __init__(self, lm: LMConfig, on_retry: Callable[[], None]) -> None:
        self._lm, self._on_retry = lm, on_retry
        self._url, self._key = str(lm.url), os.environ.get(lm.api_key_env)
        require_header_value(self._key or "", lm.api_key_env)
        self._clients = _clients(self._url, self._key, lm.max_concurrency)
        self._free = [clients for clients in self._clients for _ in range(CONNECTIONS_PER_CLIENT)]

    async def close(self) -> None:
        for keeping, closing in self._clients:
            await keeping.aclose()
            await closing.aclose()

    async def retrying(self, what: str, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the first attempt without a ServerFault. Raises ServerError with `what` was asked."""
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._lm.max_attempts),
            wait=self._seconds_to_wait,
            retry=retry_if_exception_type(ServerFault),
            before_sleep=lambda state: self._on_retry(),
            reraise=True,
        )
        try:
            return await attempts(attempt)
        except ServerFault as fault:
            tried = f"in {self._lm.max_attempts} attempts"
            raise ServerError(f"{self._url} did not answer {what} {tried}; last: {fault}") from fault

    async def exchange(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None = None,
        most_bytes: int = MOST_LIST_BYTES,
        is_compared: bool = False,
    ) -> Any:
        """Return the answer's JSON. Raises ServerFault for what may pass and ServerError for what will not.

        `is_compared`: the caller can tell this request's answer from another's, so its connection may be kept.
        """
        clients = self._free.pop()  # of which there are as many as the caller opens exchanges
        client = clients[0 if is_compared else 1]
        patience = self._lm.timeout_seconds
        seconds = patience if payload else min(patience, SECONDS_TO_LIST_MODELS)
        try:
            # httpx has time-outs for each read only: an answer that drips would never end.
            async with (
                asyncio.timeout(seconds),
                client.stream(method, self._url.rstrip("/") + path, json=payload) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise self._refusal(response, await _beginning(response), payload)
                return _json(await _whole(response, most_bytes))
        except TimeoutError as error:
            raise ServerFault(f"no answer within {seconds:g} s") from error
        except httpx.RequestError as error:
            unread = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            # Not the error itself, which quotes the server.
            raise ServerFault(f"{type(error).__name__}: {self.words(str(error))}", unread=unread) from None
        finally:
            self._free.append(clients)

    def words(self, said: str) -> str:
        """Return the server's words without the key."""
        return shown_words(said, self._key)

    def _seconds_to_wait(self, state: RetryCallState) -> float:
        backoff = wait_random_exponential(multiplier=BACKOFF_SECONDS, max=LONGEST_BACKOFF_SECONDS)(state)
        fault = state.outcome.exception() if state.outcome else None
        asked_for = fault.retry_after if isinstance(fault, ServerFault) else 0.0
        return backoff + min(asked_for, self._lm.timeout_seconds)

    def _refusal(self, response: httpx.Response, content: bytes, payload: dict[str, Any] | None) -> Exception:
        status = response.status_code
        said = self.words(f"{status} {response.reason_phrase}: {_message(content)}")
        if status in (408, 429) or status >= 500:
            return ServerFault(said, retry_after(response), unread=status == 429)
        return ServerError(f"{self._url} refuses the request: {said}{self._hint(status, payload)}")

    def _hint(self, status: int, payload: dict[str, Any] | None) -> str:
        if status in (401, 403):
            return f"; expected its key in the environment variable {self._lm.api_key_env}"
        if status == 404:
            return "; expected lm.url to be such as http://HOST:PORT/v1"
        lengths = [len(prompt) for prompt in (payload or {}).get("prompt", []) if isinstance(prompt, list)]
        return f"; the longest input of the request has {max(lengths)} tokens" if lengths else ""


def _clients(url: str, key: str | None, number: int) -> list[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Return pairs of clients: one keeps its connections for the next request, one sends each over its own.

    Several pairs, since httpx looks at all pairs of a client's connections for each request that it sends.
    """
    trust_env = not is_loopback(httpx.URL(url).host)  # no proxy reaches this machine's own servers
    certificates = httpx.create_ssl_context(trust_env=trust_env)  # slow to read, so shared
    authorization = {"Authorization": f"Bearer {key}"} if key else {}

    def client(num_kept: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **authorization},
            limits=httpx.Limits(max_connections=CONNECTIONS_PER_CLIENT, max_keepalive_connections=num_kept),
            timeout=httpx.Timeout(None, connect=SECONDS_TO_CONNECT),  # `exchange` bounds the whole
            trust_env=trust_env,
            verify=certificates,
        )

    return [(client(CONNECTIONS_PER_CLIENT), client(0)) for _ in range(0, number, CONNECTIONS_PER_CLIENT)]


async def _whole(response: httpx.Response, most_bytes: int) -> bytes:
    """Return the body as it was sent. Raises IllFormed if it is compressed: few bytes may become gigabytes."""
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise IllFormed("the answer is compressed, which was not asked for")
    content = await _beginning(response, most_bytes + 1)
    if len(content) > most_bytes:
        raise IllFormed(f"the answer has more than the {most_bytes} bytes that the longest can have")
    return content


async def _beginning(response: httpx.Response, most_bytes: int = MOST_REFUSAL_BYTES) -> bytes:
    parts, length = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        length += len(part)
        if length >= most_bytes:
            break
    return b"".join(parts)[:most_bytes]


def _json(content: bytes) -> Any:
    """Parse JSON. Raises IllFormed for other content, whatever the headers say, and for endless nesting."""
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError):
        raise IllFormed("the answer is not JSON") from None  # the error quotes it


def require_header_value(key: str, variable: str) -> None:
    """Raise UserError for a key that no header can hold: an HTTP library's own error would quote it."""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(
            f"the key in ${variable} has white space or characters that no header may hold; expected plain text"
        )


def servers_words(response: httpx.Response, secret: str | None) -> str:
    """Return the message of an answer that was read, as `shown_words` has it."""
    return shown_words(_message(response.content), secret)


def shown_words(said: str, secret: str | None) -> str:
    """Return a server's words as one short line without the secret, which it may quote."""
    line = plain_line(said)
    if secret:
        forms = "|".join({re.escape(secret), re.escape(quote(secret, safe=""))})
        line = re.sub(forms, "***", line, flags=re.IGNORECASE)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ..."


def _message(content: bytes) -> str:
    """Return the message of an error; its place differs between servers."""
    try:
        body = _json(content)
    except IllFormed:
        return content.decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(message or body, ensure_ascii=False)


def retry_after(response: httpx.Response) -> float:
    """Return the seconds to wait, from seconds or an HTTP date; 0 where the header is missing or makes no sense."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # a date without its time zone; one beyond the year 9999
        return 0.0


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
