"""What happens to a request before a route sees it: who asks, how much is sent, how many are under way.

Whoever has the token may ask; without a token, this machine alone. Then the server listens on loopback only. A page of
a browser there could still reach it under a name that it made to mean loopback (DNS rebinding), so the name in `Host`
must be loopback's too.

Pure ASGI. The guard reads the body, within its bound, so that what is left to hear of a client is that it has gone:
then what is done for it is cancelled, and its place is free.
"""

import asyncio
import hmac
import ipaddress
import os
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replug.config.errors import UserError
from replug.serving.batching import Metrics
from replug.serving.requests import ApiError, ServingLimits

VARIABLE = "REPLUG_SERVE_TOKEN"
LEAST_CHARACTERS = 16
OPEN = "/health"  # whoever sees to it that the server runs need not have the token
COMPUTING = ("/v1/embeddings", "/search", "/v1/completions", "/v1/chat/completions")
ROUTES = (OPEN, "/metrics", "/v1/models", *COMPUTING)
GONE = 499  # the status of a client that did not wait, as nginx has it


def token_for(host: str) -> str | None:
    """Return the environment's token. Raises UserError for one that is guessed soon, and for none beyond loopback."""
    token = os.environ.get(VARIABLE)
    if token is None:
        if not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others; expected a token for them in ${VARIABLE}")
        return None
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"${VARIABLE} is no token; expected {LEAST_CHARACTERS} printable ASCII characters or more without a space, "
            "such as of `openssl rand -hex 32`"
        )
    return token


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_allowed(token: str | None, authorization: str | None, host: str | None) -> None:
    """Raise ApiError for a request that may not be answered."""
    if token is None:
        given = host or ""
        name = given.partition("]")[0] + "]" if given.startswith("[") else given.partition(":")[0]
        if not is_loopback(name):
            raise ApiError(403, f"Host is {host}; expected this machine's own, such as 127.0.0.1", code="wrong_host")
        return
    scheme, _, given = (authorization or "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ApiError(401, "expected the server's token: Authorization: Bearer TOKEN", code="invalid_api_key")


class Guard:
    """Stands round the routes, at the outside of all. One request too many is refused, and never waits unseen."""

    def __init__(self, app: ASGIApp, token: str | None, limits: ServingLimits, metrics: Metrics) -> None:
        self._app, self._token, self._limits, self._metrics = app, token, limits, metrics
        self._under_way = 0
        metrics.under_way.set_function(lambda: self._under_way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's own start and end
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in ROUTES else "other"
        began, answer = time.perf_counter(), _Watched(send)
        counts, counted = route in COMPUTING, False
        try:
            if route != OPEN:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                require_allowed(self._token, headers.get("authorization"), headers.get("host"))
            if counts and self._under_way >= (most := self._limits.max_concurrency):
                raise ApiError(
                    503, f"{most} requests are under way already; ask again", code="overloaded", retries=True
                )
            counted, self._under_way = counts, self._under_way + counts
            body = await self._body(scope, receive)
            if body is not None:
                await _while_there(self._app, scope, body, receive, answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Exception:
            answer.status = 500  # which is sent further out
            raise
        finally:
            self._under_way -= counted
            self._metrics.requests.labels(route, str(answer.status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return None where the client has gone. Raises ApiError for a body that is too long, or takes too long."""
        most, seconds, body = self._limits.max_body_bytes, self._limits.timeout_seconds, b""
        too_long = ApiError(413, f"the request has more than {most} bytes", code="request_too_large")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise too_long
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_long
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise ApiError(504, f"the request took longer than {seconds:g} s (--timeout)", code="timeout") from None


class _Watched:
    """`send`, with the status that went through it."""

    def __init__(self, send: Send) -> None:
        self._send, self.status, self.is_whole = send, GONE, False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)


async def _while_there(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: _Watched) -> None:
    """Answer, unless the client goes before the answer is whole."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def replay() -> Message:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    answering, watching = asyncio.ensure_future(app(scope, replay, send)), asyncio.create_task(watch())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not send.is_whole:
            answering.cancel()
            send.status = GONE
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()
    finally:
        for task in (answering, watching):
            task.cancel()
