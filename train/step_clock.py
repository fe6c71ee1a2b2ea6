"""What the time of a step goes into, by cause. The causes of the main thread add up to the step."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

CAUSES = ("retrieve", "wait_scores", "wait_index", "refresh", "checkpoint")  # of the main thread; the rest is training


class StepClock:
    """Seconds by cause since the last `read`. Threads may measure at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(cause, time.monotonic() - start)

    def add(self, cause: str, seconds: float) -> None:
        with self._lock:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds

    def start(self) -> None:
        """Begin a step now."""
        self.read()

    def read(self) -> dict[str, float]:
        """`time/CAUSE_seconds` of the step that ends now, its whole length, and shares spent waiting and at work."""
        now = time.monotonic()
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            whole, self._began = now - self._began, now
        causes = {cause: seconds.get(cause, 0.0) for cause in CAUSES}
        waited, retrieved = causes["wait_scores"] + causes["wait_index"], causes["retrieve"]
        causes |= {"train": max(0.0, whole - sum(causes.values())), "search": seconds.get("search", 0.0), "step": whole}
        shares = {"waiting_share": waited / whole, "busy_share": (causes["train"] + retrieved) / whole}
        return {f"time/{cause}_seconds": value for cause, value in causes.items()} | {
            f"time/{name}": value for name, value in shares.items()
        }
