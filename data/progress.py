"""Progress of long work with the time left: one line that a terminal rewrites, or few lines in a log.

A run has numbered stages, and its lines give the time left of the whole run:

    stage 3 of 6, training: step 12/30 · all of it: 2:40 left

Times are measured, never guessed: a stage has one after its first units, the run has one once earlier stages timed
every remaining kind of work. Work of less than a second shows no line.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

log = logging.getLogger(__name__)

FIRST_LINE, MOST_BETWEEN = 15.0, 50.0  # seconds between lines of a log, at first and later
REWRITE = 0.2  # seconds between two changes of a terminal's line
# Seconds and units of work before a pace is shown. The first unit does not count, since it includes loading.
SETTLED, ENOUGH = 10.0, 2

_rewrite: Callable[[str], None] | None = None
_stages: "Stages | None" = None


def rewrite_with(show: Callable[[str], None] | None) -> None:
    """Let `show` display each line in place of the last one, "" to clear it. None: lines are logged."""
    global _rewrite
    _rewrite = show


def erase() -> None:
    """Clear the terminal's line of progress, before other output."""
    if _rewrite is not None:
        _rewrite("")


def format_duration(seconds: float) -> str:
    """Return 1:05 for 65 seconds, 2:00:00 for two hours."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Stages:
    """The stages of a run in order. Before `plan`, and for a name that is not among the remaining, nothing is shown."""

    def __init__(self) -> None:
        self.planned: Sequence[tuple[str, Mapping[str, int]]] = ()
        self._at = -1
        self.seconds: dict[str, float] = {}  # of a unit of each kind of work, as last measured
        self.leader: Progress | None = None  # first unfinished one; others show lines if it is silent
        self.last_line = 0.0  # time of the last line of any progress

    def plan(self, stages: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        """Set the stages by name, each with its units of work by kind, such as 1,000 documents to embed."""
        self.planned = stages

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce the next stage of this name; progress within the block belongs to it."""
        global _stages
        following = [place for place in range(self._at + 1, len(self.planned)) if self.planned[place][0] == name]
        if not following:
            yield
            return
        self._at, self.leader, self.last_line = following[0], None, time.monotonic()
        log.info(self.title)
        before, _stages = _stages, self
        try:
            yield
        finally:
            _stages = before
            erase()

    @property
    def title(self) -> str:
        """Return the number and the name of the stage."""
        return f"stage {self._at + 1} of {len(self.planned)}, {self.planned[self._at][0]}"

    def left(self, own: float) -> str:
        """Return the time left of the run, `own` seconds of it in this stage; until all work is timed, only `own`."""
        later = [(kind, units) for _, work in self.planned[self._at + 1 :] for kind, units in work.items() if units]
        if any(kind not in self.seconds for kind, _ in later):
            return f"{format_duration(own)} left of this stage"
        return f"all of it: {format_duration(own + sum(units * self.seconds[kind] for kind, units in later))} left"


class Progress:
    """Counts units of work, and shows the finished units and, once measured, the time left.

    `work` converts a unit to a kind of work that later stages share, such as ("pairs", 40) for 40 pairs in a unit.
    """

    def __init__(self, what: str, total: int, done: int = 0, work: tuple[str, int] | None = None) -> None:
        self.what, self.total, self.done = what, total, done
        self._first, self._work, self._start = done, work, time.monotonic()
        self._last, self._stages = self._start, _stages
        self._timed_from: tuple[float, int] | None = None  # time and number of units when the first was done
        if _stages is not None and (_stages.leader is None or _stages.leader.is_done):
            _stages.leader = self

    @property
    def is_done(self) -> bool:
        return self.done >= self.total

    def advance(self, units: int = 1, note: str = "") -> None:
        """Count finished units, and show a line when one is due."""
        self.done += units
        now = time.monotonic()
        if self._stages is not None and self._stages.leader is not self:
            if now - self._stages.last_line >= MOST_BETWEEN:
                self._show(self._line(None, note), now)
            return
        elapsed, pace = now - self._start, self._pace(now)
        between = max(FIRST_LINE, min(MOST_BETWEEN, elapsed / 4)) if _rewrite is None else REWRITE
        if self.is_done:
            erase()
        elif elapsed >= 1 and now - self._last >= between:
            self._show(self._line(pace, note), now)

    def _show(self, line: str, now: float) -> None:
        self._last = now
        if self._stages is not None:
            self._stages.last_line = now
        (_rewrite or log.info)(line)

    def _pace(self, now: float) -> float | None:
        """Return the seconds of a unit, and record them in the stages; None before enough is measured."""
        if self._timed_from is None:
            self._timed_from = now, self.done
        start, before = self._timed_from
        timed, seconds = self.done - before, now - start
        pace = seconds / timed if seconds >= SETTLED and timed >= ENOUGH else None
        if self._stages is not None and self._work is not None and (pace or self.is_done):
            kind, units = self._work
            whole = (now - self._start) / max(1, self.done - self._first)  # the fallback for short work
            self._stages.seconds[kind] = (pace or whole) / units
        return pace

    def _line(self, pace: float | None, note: str) -> str:
        parts = [f"{self.what}: {self.done}/{self.total}"]
        if self._stages is not None:
            parts = [f"{self._stages.title}: {self.what} {self.done}/{self.total}"]
        if pace is not None:
            own = pace * (self.total - self.done)
            parts.append(f"{format_duration(own)} left" if self._stages is None else self._stages.left(own))
        return " · ".join([*parts, *filter(None, [note])])
