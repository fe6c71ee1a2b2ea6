"""Limit access: the bearer token, and bounds on requests and connections.

Every client with the token is served. Without a token the server listens on loopback only. A web page could still reach
it under a name of its author that resolves to loopback (DNS rebinding), so `Host` must name loopback too.

Requests must arrive in time, and the number of connections is limited: uvicorn has no such limits. An endless head
would hold a file descriptor for ever, and without descriptors the server answers nobody. It is a small server for one
team; put a proxy before it to face the internet.
"""

import asyncio
import hmac
import logging
import math
import os
import re
from typing import ClassVar

import h11
from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from replug.config.errors import UserError
from replug.config.rules import is_loopback
from replug.serving.openai_api import ApiError
from replug.serving.service import Service

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "REPLUG_SERVE_TOKEN"
MIN_TOKEN_CHARACTERS = 16
MAX_BODY_BYTES = 8 * 2**20
HEALTH = "/health"  # needs no token
COMPUTING = ("/v1/embeddings", "/search", "/v1/completions", "/v1/chat/completions")
GONE = 499  # status for a disconnected client, as in nginx
SECONDS_TO_ARRIVE = 20.0  # a request's head and body
MAX_CONNECTIONS = 512  # of the 1,024 descriptors that a process may usually open
SECONDS_BETWEEN_LINES = 60.0
BACKLOG = 128  # connections that asyncio accepts at once, before refusing any


def token_for(host: str) -> str | None:
    """Return the environment's token. Raises UserError for a weak token, or for a missing one beyond loopback."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        if not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others; expected a token for them in ${TOKEN_VARIABLE}")
        return None
    if not re.fullmatch(rf"[!-~]{{{MIN_TOKEN_CHARACTERS},}}", token):  # printable ASCII without a space
        expected = f"expected {MIN_TOKEN_CHARACTERS} ASCII characters or more, such as by `openssl rand -hex 32`"
        raise UserError(f"${TOKEN_VARIABLE} is not a token; {expected}")
    return token


class Guard:
    """Middleware that refuses requests without the token, large requests, and too many at once."""

    def __init__(self, app: ASGIApp, token: str | None, service: Service) -> None:
        self._app, self._token, self._service, self._under_way = app, token, service, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan events
            await self._app(scope, receive, send)
            return
        counted = scope["path"] in COMPUTING
        self._under_way += counted
        try:
            self._require_admitted(scope["path"], Request(scope))
            async with asyncio.timeout(self._service.limits.timeout_seconds + SECONDS_TO_ARRIVE):
                await self._app(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except TimeoutError:  # the client does not read: the server closes the connection
            return
        finally:
            self._under_way -= counted

    def _require_admitted(self, route: str, request: Request) -> None:
        """Raise ApiError for a request that must not reach its route."""
        if route == HEALTH:
            return
        name = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if self._token is None and not is_loopback(name):
            message = f"Host is {request.headers.get('host')}; expected this machine's own, such as 127.0.0.1"
            raise ApiError(403, message, code="wrong_host")
        if self._token is None and "origin" in request.headers:  # browsers send a page's requests without consent
            message = f"Origin is {request.headers['origin']}; expected a token (${TOKEN_VARIABLE}) for browsers"
            raise ApiError(403, message, code="wrong_origin")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if self._token is not None and not (
            scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode())
        ):
            raise ApiError(401, "expected the server's token: Authorization: Bearer TOKEN", code="invalid_api_key")
        length = request.headers.get("content-length", "")
        if request.method == "POST" and not length.isdecimal():
            raise ApiError(411, "Content-Length is missing; expected the number of bytes", code="length_required")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise ApiError(413, f"the request exceeds {MAX_BODY_BYTES} bytes", code="request_too_large")
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and media_type != "application/json":
            raise ApiError(415, f"Content-Type is {media_type!r}; expected application/json", code="wrong_content_type")
        most = self._service.limits.max_concurrency
        if route in COMPUTING and self._under_way > most:
            raise ApiError(503, f"{most} requests are under way already; ask again", code="overloaded")


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed if its request does not arrive in time, or earlier to make room for newer ones.

    `waiting` holds the connections without a request under way, the longest wait first.
    """

    waiting: ClassVar[dict["BoundedConnection", None]] = {}
    _told_at: ClassVar[float] = -math.inf  # time of the last warning
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waiting[self] = None
        if len(self.connections) > MAX_CONNECTIONS:
            oldest = next(iter(self.waiting))
            oldest._end_wait()
            oldest.transport.abort()
            if (now := self.loop.time()) - self._told_at > SECONDS_BETWEEN_LINES:
                BoundedConnection._told_at = now
                log.warning(f"{MAX_CONNECTIONS} connections are open; idle ones are closed for new ones")
        self._bound()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._bound()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _bound(self) -> None:
        """Start the timer while a request is awaited or arriving; stop it when the request is complete."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._end_wait()
        elif self._timer is None:
            self._timer = self.loop.call_later(SECONDS_TO_ARRIVE, self.transport.abort)

    def _end_wait(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
