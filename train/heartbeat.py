"""Whether the trainer's other ranks are alive: each counts in the process group's store, and rank 0 looks.

A process that is stopped, or whose machine is gone without a word, keeps its connections. Who waits for it would wait
for as long as a batch may take.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistError, TCPStore

BEAT_SECONDS = 2.0
SILENT_SECONDS = 120.0  # of a rank that counted before: a loaded machine delays a beat by seconds
CONNECT = timedelta(minutes=10)  # until rank 0 has opened the store


@contextmanager
def beating(rank: int, address: str, port: int) -> Iterator[None]:
    """Count in the background while the block runs."""
    ended = threading.Event()
    threading.Thread(target=_beat, args=(_key(rank), address, port, ended), daemon=True, name="heartbeat").start()
    try:
        yield
    finally:
        ended.set()


def _beat(key: str, address: str, port: int, ended: threading.Event) -> None:
    with suppress(DistError):  # rank 0 has ended, and this process ends with it
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
        while True:
            store.add(key, 1)
            if ended.wait(BEAT_SECONDS):
                return


class Heartbeats:
    """What rank 0 hears of the others, once the process group's store is open."""

    def __init__(self, address: str, port: int) -> None:
        self._store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
        self._heard: dict[int, tuple[int, float]] = {}  # the count, and when it was new

    def silent_seconds(self, rank: int) -> float:
        """For how long the rank has not counted; 0 before it began to."""
        if not self._store.check([_key(rank)]):
            return 0.0
        count, now = self._store.add(_key(rank), 0), time.monotonic()
        if rank not in self._heard or self._heard[rank][0] != count:
            self._heard[rank] = (count, now)
        return now - self._heard[rank][1]


def _key(rank: int) -> str:
    return f"replug/heartbeat/{rank}"
