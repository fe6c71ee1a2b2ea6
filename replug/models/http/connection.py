"""One exchange with an HTTP server, and its retries.

Patience depends on the fault. A server that does not answer (nothing listens, it loads its model, a quota is used up
for now) has `lm.patience_minutes`, an ill-formed answer five attempts, and a permanent refusal is a `ServerError` at
once, with the server's message. A server that was never reached has seconds. Waits are random and growing, up to a
minute, or as long as the server asks.

Answers have bounds. The key is sent in a header to `lm.url` alone and never shown, not even where the server quotes it.
"""

import asyncio
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from replug.config.errors import RunError, UserError
from replug.config.plain_text import plain_line
from replug.config.rules import api_version, is_loopback, server_url
from replug.config.schema import LMConfig
from replug.data.progress import format_duration

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTIONS_PER_CLIENT = 4
SECONDS_TO_CONNECT = 15.0
SECONDS_TO_LIST_MODELS = 30.0  # which takes no computing
BACKOFF_SECONDS = 0.5  # the longest first wait before a retry; doubled each time
LONGEST_BACKOFF_SECONDS = 60.0  # quotas are by the minute
SECONDS_WORTH_A_LINE = 4.0  # of a wait; shorter waits are not logged
SECONDS_TO_REACH = 5.0  # a server that never answered: its address may be wrong
MAX_ATTEMPTS = 5  # at ill-formed answers
USED_UP = ("insufficient_quota", "billing")  # codes of errors that waiting does not solve
FILTERED = "content_filter"  # the reason that an answer ended, or did not begin
UNSUPPORTED = ("unsupported_parameter", "unsupported_value")  # codes of errors that name a field of the request
LONGEST_MESSAGE = 300  # characters of a server's message
MOST_REFUSAL_BYTES = 1 << 16  # of an error's answer; the rest is not read
MOST_LIST_BYTES = 4 << 20  # of the list of models


class ServerFault(Exception):
    """A fault that may pass. `unread`: the server did not read the request, so it cost nothing."""

    def __init__(self, message: str, retry_after: float = 0.0, unread: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.unread = retry_after, unread


class IllFormed(ServerFault):
    """An answer without the requested shape or numbers."""


class ServerError(RunError):
    """A refused request, or one without a good answer in time: the cause is the last fault.

    `unsupported` is the field of the request that the server does not know; `is_filtered`: a filter refused the text.
    """

    def __init__(self, message: str, unsupported: str = "", is_filtered: bool = False) -> None:
        super().__init__(message)
        self.unsupported, self.is_filtered = unsupported, is_filtered


class ServerConnection:
    """Connections to the server at `url` that stay open, for at most `max_concurrency` exchanges at once.

    `num_retries` counts further attempts. `is_reached`: the server accepted a connection. Redirects are not followed.
    Raises UserError for an `lm.url` that is not a URL, and for a key that no header can hold.
    """

    def __init__(self, lm: LMConfig) -> None:
        self.url, self.is_reached, self.num_retries = server_url(lm), False, 0
        self._lm = lm
        self._key = os.environ.get(lm.api_key_env)
        if self._key:
            require_header_value(self._key, lm.api_key_env)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._clients = _clients(self.url, headers, api_version(lm), lm.max_concurrency)
        self._free = [client for client in self._clients for _ in range(CONNECTIONS_PER_CLIENT)]
        self._answered_at, self._silent_until = 0.0, 0.0  # monotonic times: of the last good answer, of the last line

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def retrying(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the first attempt that raises no ServerFault. Raises ServerError."""
        attempts = ill_formed = 0
        first_at = 0.0  # when the first fault came
        while True:
            try:
                result = await attempt()
            except ServerFault as fault:
                now, attempts = time.monotonic(), attempts + 1
                ill_formed += isinstance(fault, IllFormed)
                first_at = first_at or now
                left = self._seconds_left(fault, ill_formed, now, first_at)
                if left <= fault.retry_after:
                    raise ServerError(self._gave_up(fault, attempts, left)) from fault
                longest = min(LONGEST_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** min(attempts - 1, 20))
                pause = min(left, fault.retry_after + random.uniform(0.5, 1) * longest)
                if pause >= SECONDS_WORTH_A_LINE and now >= self._silent_until:  # a line for all waiting requests
                    self._silent_until = now + pause
                    log.warning(
                        f"waiting for {self.url}: {fault}; next attempt in {format_duration(pause)}, for "
                        f"{format_duration(left)} more (lm.patience_minutes)"
                    )
                await asyncio.sleep(pause)
                self.num_retries += 1
            else:
                self._answered_at = time.monotonic()
                return result

    def _seconds_left(self, fault: ServerFault, ill_formed: int, now: float, first_at: float) -> float:
        """Return the seconds left for retries of a request that had so many `ill_formed` answers."""
        patience = 60 * self._lm.patience_minutes
        if not self.is_reached:
            return min(SECONDS_TO_REACH, patience) - (now - first_at)
        if isinstance(fault, IllFormed) and ill_formed >= MAX_ATTEMPTS:
            return 0.0
        # An unread request is not at fault: an answer to any other request restarts the patience.
        return patience - (now - (max(first_at, self._answered_at) if fault.unread else first_at))

    def _gave_up(self, fault: ServerFault, attempts: int, left: float) -> str:
        if not self.is_reached:
            return f"{self.url} cannot be reached; expected a server that runs there. Last: {fault}"
        patience = f"(lm.patience_minutes={self._lm.patience_minutes:g})"
        if left > 0:
            return f"{self.url} asks to wait {format_duration(fault.retry_after)}, too long {patience}: {fault}"
        return f"{self.url} did not answer in {attempts} attempts {patience}; last: {fault}"

    async def exchange(
        self, method: str, path: str, payload: dict[str, Any] | None = None, most_bytes: int = MOST_LIST_BYTES
    ) -> Any:
        """Return the answer's JSON. Raises ServerFault for a fault that may pass, else ServerError."""
        client = self._free.pop()  # one for each of the caller's exchanges
        patience = self._lm.timeout_seconds
        seconds = patience if payload else min(patience, SECONDS_TO_LIST_MODELS)
        try:
            async with asyncio.timeout(seconds):  # httpx has time-outs for each read only: a drip would never end
                request = client.build_request(method, self.url + path, json=payload)
                response = await client.send(request, stream=True)
                try:
                    self.is_reached = True
                    if response.status_code != httpx.codes.OK:
                        raise self._refusal(response, await _beginning(response))
                    return self._no_error(_json(await _whole(response, most_bytes)))
                finally:
                    await response.aclose()
        except TimeoutError as error:
            self.is_reached = True  # connecting has its own, shorter limit
            raise ServerFault(f"no answer within {seconds:g} s") from error
        except httpx.RequestError as error:
            unread = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            self.is_reached = self.is_reached or not unread
            # Not the error itself, which quotes the server.
            raise ServerFault(f"{type(error).__name__}: {self.words(str(error).rstrip('.'))}", unread=unread) from None
        finally:
            self._free.append(client)

    def words(self, text: str) -> str:
        """Return a server's message without the key."""
        return shown_words(text, self._key)

    def _refusal(self, response: httpx.Response, content: bytes) -> Exception:
        status, wait = response.status_code, retry_after(response)
        error, message = _error_in(content)
        reply = self.words(f"{status} {response.reason_phrase}: {message}").rstrip(": ")
        code, names = str(error.get("code")), [str(error.get(name)) for name in ("type", "code")]
        if (status in (408, 429) or status >= 500) and not any(name.startswith(USED_UP) for name in names):
            return ServerFault(reply, wait, unread=status in (429, 503))
        message = f"{self.url} refuses the request: {reply}{self._hint(response)}"
        unsupported = str(error.get("param") or "") if code.startswith(UNSUPPORTED) else ""
        return ServerError(message, unsupported, is_filtered=any(FILTERED in name for name in names))

    def _no_error(self, body: Any) -> Any:
        """Return an answer. Raises ServerFault for an error sent with status 200, as some gateways do."""
        if isinstance(body, dict) and body.get("error") and "choices" not in body:
            error = body["error"]
            code = f"{error['code']}: " if isinstance(error, dict) and error.get("code") else ""
            raise ServerFault(self.words(f"the answer is an error: {code}{_error_in(json.dumps(body).encode())[1]}"))
        return body

    def _hint(self, response: httpx.Response) -> str:
        if response.status_code in (401, 403):
            has_key = "the server accepts another key than" if self._key else "no key was sent: expected"
            return f"; {has_key} the one in the environment variable {self._lm.api_key_env}"
        if response.status_code == 404:
            return "; expected lm.url to be such as http://HOST:PORT/v1, and lm.model a name that the server knows"
        return ""


def _clients(url: str, headers: dict[str, str], params: dict[str, str], number: int) -> list[httpx.AsyncClient]:
    """Return several clients, since httpx compares all connections of a client for each request."""
    trust_env = not is_loopback(httpx.URL(url).host)  # no proxy reaches this machine's own servers
    certificates = httpx.create_ssl_context(trust_env=trust_env)  # slow to read, so shared

    return [
        httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **headers},
            params=params,
            limits=httpx.Limits(max_connections=CONNECTIONS_PER_CLIENT),
            timeout=httpx.Timeout(None, connect=SECONDS_TO_CONNECT),  # `exchange` bounds the whole
            trust_env=trust_env,
            verify=certificates,
        )
        for _ in range(0, number, CONNECTIONS_PER_CLIENT)
    ]


async def _whole(response: httpx.Response, most_bytes: int) -> bytes:
    """Return the body as it was sent. Raises IllFormed if it is compressed: few bytes may become gigabytes."""
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise IllFormed("the answer is compressed, against the request")
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
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise IllFormed("the answer is not JSON") from None  # the error quotes it


def require_header_value(key: str, variable: str) -> None:
    """Raise UserError for a key that no header can hold: an HTTP library's own error would quote it."""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(
            f"the key in ${variable} has white space or characters that no header may hold; expected plain text"
        )


def servers_words(response: httpx.Response, secret: str | None) -> str:
    """Return the message of an answer that was read, in the form of `shown_words`."""
    return shown_words(_error_in(response.content)[1], secret)


def shown_words(text: str, secret: str | None) -> str:
    """Return a server's words as one short line without the secret, which it may quote."""
    line = plain_line(text)
    if secret:
        forms = "|".join({re.escape(secret), re.escape(quote(secret, safe=""))})
        line = re.sub(forms, "***", line, flags=re.IGNORECASE)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ..."


def _error_in(content: bytes) -> tuple[dict[str, Any], str]:
    """Return an error object as OpenAI-like servers send it, or {}, and its message, wherever it stands."""
    try:
        body = _json(content)
    except IllFormed:
        return {}, content.decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    words = message if isinstance(message, str) else json.dumps(message or body, ensure_ascii=False)
    return error if isinstance(error, dict) else {}, words


def retry_after(response: httpx.Response) -> float:
    """Return the seconds to wait; 0 where the header is missing, a date, or makes no sense."""
    value = response.headers.get("Retry-After", "")
    return float(value) if re.fullmatch(r"\d{1,9}(\.\d+)?", value) else 0.0
