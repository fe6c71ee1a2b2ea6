"""What happens to a request before a route sees it: who asks, how much is sent, how many are under way.

Pure ASGI. The body is read here, within its bound, so that what is left to hear of a client is that it has gone: then
what is done for it is cancelled, and its place is free.
"""

import asyncio
import logging
import time
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replug.serving.auth import require_allowed
from replug.serving.errors import ApiError, timed_out
from replug.serving.limits import Admission, ServingLimits
from replug.serving.metrics import Metrics

log = logging.getLogger(__name__)

OPEN = "/health"  # whoever sees to it that the server runs need not have the token
COMPUTING = ("/v1/embeddings", "/search", "/v1/completions", "/v1/chat/completions")
ROUTES = (OPEN, "/metrics", "/v1/models", *COMPUTING)
GONE = 499  # the status of a client that did not wait, as nginx has it


class Guard:
    """Round the routes, at the outside of all."""

    def __init__(self, app: ASGIApp, token: str | None, limits: ServingLimits, metrics: Metrics) -> None:
        self._app, self._token, self._limits, self._metrics = app, token, limits, metrics
        self._admission = Admission(limits.max_concurrency)
        metrics.under_way.set_function(lambda: self._admission.under_way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's own start and end
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in ROUTES else "other"
        began, answer = time.perf_counter(), _Watched(send)
        try:
            await self._guarded(scope, receive, answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Exception:
            answer.status = 500  # which is sent by who stands further out
            raise
        finally:
            self._metrics.requests.labels(route, str(answer.status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def _guarded(self, scope: Scope, receive: Receive, send: "_Watched") -> None:
        if scope["path"] != OPEN:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            require_allowed(self._token, headers.get("authorization"), headers.get("host"))
        with self._admitted(scope["path"]):
            body = await self._body(scope, receive)
            if body is not None:
                await _while_there(self._app, scope, _Replayed(body, receive), send)

    def _admitted(self, path: str) -> AbstractContextManager[None]:
        return self._admission.admitted() if path in COMPUTING else nullcontext()

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None where the client has gone. Raises ApiError for a body that is too long, or takes too long."""
        most, body = self._limits.max_body_bytes, b""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise _too_long(most)
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise _too_long(most)
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise timed_out(self._limits.timeout_seconds) from None


class _Replayed:
    """The body that was read, then whatever else the client does, which is to go."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive, self._gone = receive, asyncio.Event()

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()


class _Watched:
    """`send`, with the status that went through it."""

    def __init__(self, send: Send) -> None:
        self._send, self.status, self.is_whole = send, GONE, False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)


async def _while_there(app: ASGIApp, scope: Scope, receive: _Replayed, send: _Watched) -> None:
    """Answer, unless the client goes before the answer is whole."""
    answering = asyncio.ensure_future(app(scope, receive, send))
    watching = asyncio.create_task(receive.until_gone())
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


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the request has more than {most} bytes", code="request_too_large")
