"""Fake GPUs that are as slow as they are said to be, and that their processes take turns on.

A piece of work is computed for real on a core while it holds its device. Then it goes on to hold the device, in slices
between which others have their turn, until it has held it for as long as its size says. So a device is a slow GPU whose
driver gives time slices, and a machine of two cores can have four of them. A piece whose computing alone takes longer
is late, which is noted: the machine was too busy, or too slow.

`paced_actors.pace` puts this into what a run makes its actors of, and into rank 0. Scorers, builders, queries that are
encoded and training steps are paced; searches, texts that measure a refresh, and files are not.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

VARIABLE = "REPLUG_PACE"
SLICE = 0.02  # seconds; a driver's are shorter, and so are its launches
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a device takes for a token that is scored, a document, a step, and the queries of a batch."""

    folder: str  # for locks, and the notes on every piece
    token: float
    document: float
    step: float
    queries: float

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def stated_pace() -> Pace:
    return Pace(**json.loads(os.environ[VARIABLE]))


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work: what it computed for real, and how long the device took for it without the turns of others."""

    role: str
    computed: float
    held: float
    asked: float


class PacedDevice:
    """One fake GPU, as one process sees it. One thread of a process works at a time."""

    def __init__(self, name: str, folder: Path) -> None:
        self._next, self._turn = ((folder / f"{name}.{lock}").open("w") for lock in ("next", "turn"))
        self._notes = (folder / f"pieces-{os.getpid()}.jsonl").open("a", buffering=1)
        self._began = 0.0

    def work(self, role: str, compute: Callable[[], Result], seconds: Callable[[Result], float]) -> Result:
        self.begin()
        result = compute()
        self.end(role, seconds(result))
        return result

    def begin(self) -> None:
        self._take_turn()
        self._began = time.monotonic()

    def end(self, role: str, seconds: float) -> None:
        """Of a piece that takes so many seconds of the device."""
        computed = held = self._give_turn()
        while held < seconds:
            self._take_turn()
            self._began = time.monotonic()
            time.sleep(min(SLICE, seconds - held))
            held += self._give_turn()
        self._notes.write(json.dumps(asdict(Piece(role, computed, held, seconds))) + "\n")

    def _take_turn(self) -> None:
        """Who had the last turn stands behind who waits for this one, which holds `next`."""
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)

    def _give_turn(self) -> float:
        held = time.monotonic() - self._began
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        return held


def take_pieces(folder: Path) -> list[Piece]:
    """All that are noted there; the notes go."""
    notes = sorted(folder.glob("pieces-*.jsonl"))
    pieces = [Piece(**json.loads(line)) for path in notes for line in path.read_text().splitlines()]
    for path in notes:
        path.unlink()
    return pieces
