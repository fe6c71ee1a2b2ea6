"""Limit access: the bearer token, and bounds on requests.

Every client with the token is served. Without a token the server listens on loopback only. A web page could still reach
it under a name of its author that resolves to loopback (DNS rebinding), so `Host` must name loopback too.

Requests must arrive in time: uvicorn has no such limit, and an endless head would hold a file descriptor for ever. It
is a small server for one team; put a proxy before it to face the internet.
"""

import asyncio
import hmac
import os
import re

import h11
from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from replug.config.errors import UserError
from replug.config.rules import is_loopback
from replug.serving.openai_api import ApiError

TOKEN_VARIABLE = "REPLUG_SERVE_TOKEN"
MIN_TOKEN_CHARACTERS = 16
MAX_BODY_BYTES = 8 * 2**20
HEALTH = "/health"  # needs no token
GONE = 499  # status for a disconnected client, as in nginx
SECONDS_TO_ARRIVE = 20.0  # a request's head and body


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
    """Middleware that refuses requests without the token, and large requests."""

    def __init__(self, app: ASGIApp, token: str | None, timeout_seconds: float) -> None:
        self._app, self._token, self._timeout_seconds = app, token, timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan events
            await self._app(scope, receive, send)
            return
        try:
            self._require_admitted(scope["path"], Request(scope))
            async with asyncio.timeout(self._timeout_seconds + SECONDS_TO_ARRIVE):
                await self._app(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except TimeoutError:  # the client does not read: the server closes the connection
            return

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


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed if its request does not arrive in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._bound()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._bound()

    def _bound(self) -> None:
        """Start the timer while a request is awaited or arriving; stop it when the request is complete."""
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_arriving and self._timer is None:
            self._timer = self.loop.call_later(SECONDS_TO_ARRIVE, self.transport.abort)
        elif not is_arriving and self._timer is not None:
            self._timer.cancel()
            self._timer = None
