"""What the metrics say of requests to a server: how many came again, how busy the server is, how long work waits."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class RequestMeter:
    """Counts since the start, and rates since the last call of `read`. Safe among threads."""

    def __init__(self, max_concurrency: int) -> None:
        self._max_concurrency = max_concurrency
        self._lock = threading.Lock()
        self._retries = self._in_flight = 0
        self._restart()

    def read(self) -> dict[str, float]:
        """Tokens a second, share of the allowed concurrency in use, and mean wait (seconds) for a place in it."""
        with self._lock:
            self._advance()
            seconds = max(self._last - self._since, 1e-9)
            rates = {
                "retries": float(self._retries),
                "tokens_per_second": self._tokens / seconds,
                "busy_share": self._busy_seconds / seconds / self._max_concurrency,
                "queue_wait_seconds": self._wait_seconds / max(1, self._waits),
            }
            self._restart()
            return rates

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Round one request."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def retried(self) -> None:
        with self._lock:
            self._retries += 1

    def spent(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._waits += 1
            self._wait_seconds += seconds

    def _restart(self) -> None:
        self._since = self._last = time.monotonic()
        self._tokens = self._waits = 0
        self._busy_seconds = self._wait_seconds = 0.0

    def _change(self, by: int) -> None:
        with self._lock:
            self._advance()
            self._in_flight += by

    def _advance(self) -> None:
        now = time.monotonic()
        self._busy_seconds += self._in_flight * (now - self._last)
        self._last = now
