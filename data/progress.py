"""Progress of long work with the time left: one line that a terminal rewrites, or few lines in a log.

A run has numbered stages, and its lines speak of the whole:

    stage 3 of 6, training: step 12/30 · all of it: 2:40 left

Work of less than a second says nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

log = logging.getLogger(__name__)

FIRST_LINE, MOST_BETWEEN = 15.0, 600.0  # seconds between lines of a log, at first and in a long night
REWRITE = 0.2  # seconds between two changes of a terminal's line
SETTLED = 2.0  # seconds of work after which its own pace tells more than what was expected

_rewrite: Callable[[str], None] | None = None
_stages: "Stages | None" = None


def rewrite_with(show: Callable[[str], None] | None) -> None:
    """Let `show` display each line of progress in place of the line before, "" for none. None: lines are logged."""
    global _rewrite
    _rewrite = show


def erase() -> None:
    """Take the line that is rewritten off the screen, before something else is printed."""
    if _rewrite is not None:
        _rewrite("")


def format_duration(seconds: float) -> str:
    """Return 1:05 for 65 seconds, 2:00:00 for two hours."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Stages:
    """The stages of a run in order. Before they are planned, and for a name that does not follow, none is told."""

    def __init__(self) -> None:
        self._planned: list[tuple[str, float | None]] = []
        self._at, self._began = -1, 0.0
        self.leader: Progress | None = None  # began first in the stage and is not done; others beside it are silent

    @property
    def are_planned(self) -> bool:
        return bool(self._planned)

    def plan(self, seconds: Sequence[tuple[str, float | None]]) -> None:
        """Set the stages by name, each with the seconds that it is expected to take; None: not known."""
        self._planned = list(seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say that the next stage of this name begins; progress within the block is that of the stage."""
        global _stages
        following = [place for place in range(self._at + 1, len(self._planned)) if self._planned[place][0] == name]
        if not following:
            yield
            return
        self._at, self._began, self.leader = following[0], time.monotonic(), None
        expected = self._planned[self._at][1]
        log.info(self.title + (f", about {format_duration(expected)}" if expected and expected >= 1 else ""))
        before, _stages = _stages, self
        try:
            yield
        finally:
            _stages = before
            erase()

    @property
    def title(self) -> str:
        """Return the number and the name of the stage."""
        return f"stage {self._at + 1} of {len(self._planned)}, {self._planned[self._at][0]}"

    def left(self, own: float, elapsed: float) -> str:
        """Say how long all of it still takes, where a part of the stage takes `own` more seconds by its pace."""
        expected = self._planned[self._at][1]
        if expected is not None and elapsed < SETTLED:
            own = max(own, expected - (time.monotonic() - self._began))
        later = [seconds for _, seconds in self._planned[self._at + 1 :]]
        if None in later:
            return f"{format_duration(own)} left of this stage"
        return f"all of it: {format_duration(own + sum(seconds or 0.0 for seconds in later))} left"


class Progress:
    """Counts units of work and says how many are done and the time left."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done = what, total, done
        self._first, self._start = done, time.monotonic()
        self._last, self._stages = self._start, _stages
        if _stages is not None and (_stages.leader is None or _stages.leader.is_done):
            _stages.leader = self

    @property
    def is_done(self) -> bool:
        return self.done >= self.total

    def advance(self, units: int = 1, note: str = "") -> None:
        """Count finished units; says so when it is time."""
        self.done += units
        if self._stages is not None and self._stages.leader is not self:
            return
        now = time.monotonic()
        elapsed = now - self._start
        between = max(FIRST_LINE, min(MOST_BETWEEN, elapsed / 4)) if _rewrite is None else REWRITE
        if self.is_done:
            self._end(elapsed, note)
        elif elapsed >= 1 and now - self._last >= between:
            self._last = now
            (_rewrite or log.info)(self._line(elapsed, note))

    def _end(self, elapsed: float, note: str) -> None:
        if self._stages is None and elapsed >= 1:
            log.info(f"{self.what}: {self.done}/{self.total} · took {format_duration(elapsed)}{_noted(note)}")
        erase()

    def _line(self, elapsed: float, note: str) -> str:
        finished = self.done - self._first
        own = elapsed / finished * (self.total - self.done) if finished else 0.0
        if self._stages is None:
            return f"{self.what}: {self.done}/{self.total} · {format_duration(own)} left{_noted(note)}"
        left = self._stages.left(own, elapsed)
        return f"{self._stages.title}: {self.what} {self.done}/{self.total} · {left}{_noted(note)}"


def _noted(note: str) -> str:
    return f" · {note}" if note else ""
