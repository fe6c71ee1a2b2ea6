"""Units of scores on their way to disk: written by a thread of its own, and several in one transaction.

A training step's units come over seconds and touch the same pages of the file, so they are written together when the
step's last one is there. What comes without an end in sight, such as the pairs of a long file, is written every few
seconds. Who computes never waits for a disk.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Unit = TypeVar("Unit")

SECONDS_BETWEEN_WRITES = 5.0  # what kill -9 may cost where no call ends


class UnitWriter(Generic[Unit]):
    """`write(units)` is called in one thread, with units in the order they came. It must not raise.

    `put(unit, is_last)`: the last unit of a call is written at once, with all that wait.
    """

    def __init__(self, write: Callable[[list[Unit]], None]) -> None:
        self._write = write
        self._queue: queue.Queue[tuple[Unit, bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="score-writer", daemon=True)
        self._thread.start()

    def put(self, unit: Unit, is_last: bool) -> None:
        self._queue.put((unit, is_last))

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while units := self._next():
            self._write(units)

    def _next(self) -> list[Unit]:
        """The units of the next transaction; none when it is closed and all is written."""
        units: list[Unit] = []
        deadline = float("inf")
        while True:
            try:
                timeout = None if not units else max(0.0, deadline - time.monotonic())
                item = self._queue.get(timeout=timeout)
            except queue.Empty:
                return units
            if item is None:
                if units:
                    self._queue.put(None)  # for the next time
                return units
            units.append(item[0])
            deadline = min(deadline, time.monotonic() + SECONDS_BETWEEN_WRITES)
            if item[1] and self._queue.empty():
                return units
