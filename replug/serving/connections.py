"""Bound what one connection may cost: a request must arrive whole in time, and only so many connections are open.

uvicorn has no such limits. A head that never ends would hold a file descriptor for ever, and without descriptors the
server answers nobody. It is a small server for one team; what the internet sends is for a proxy before it.
"""

import asyncio
import logging
import math

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

SECONDS_TO_ARRIVE = 20.0  # a request's head and body
MAX_CONNECTIONS = 512  # of the 1,024 descriptors that a process may usually open
SECONDS_BETWEEN_LINES = 60.0
BACKLOG = 128  # connections that asyncio accepts at once, before any can be refused


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which is closed if its request does not arrive in time, or before, for newer ones."""

    connections: "set[BoundedConnection]"  # type: ignore[assignment]
    _timer: asyncio.TimerHandle | None = None
    _waits_since: float | None = None  # for a request; None while one is answered
    _told_at = -math.inf  # of all connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._waits_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:  # those that wait for a request give way, the longest first
            waiting = [one for one in self.connections if one._waits_since is not None]
            closed = min(waiting, key=lambda one: one._waits_since or 0.0)
            closed._waits_since = None  # the loop forgets it later: the next one too many closes another
            closed._unset_timer()
            closed.transport.abort()
            self._tell()
        self._bound()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._bound()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_timer()
        super().connection_lost(exc)

    def _bound(self) -> None:
        """Begin to count when a request begins, and end when it is here."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unset_timer()
            self._waits_since = None
        elif self._timer is None:
            self._timer = self.loop.call_later(SECONDS_TO_ARRIVE, self.transport.abort)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        """Say it in the log, now and then."""
        now = self.loop.time()
        if now - BoundedConnection._told_at > SECONDS_BETWEEN_LINES:
            BoundedConnection._told_at = now
            log.warning(f"{MAX_CONNECTIONS} connections are open; those that ask for nothing are closed for new ones")
