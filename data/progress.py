"""Progress of long work with the time left, as plain lines that read well in a terminal and in a log."""

import logging
import time

log = logging.getLogger(__name__)


def format_duration(seconds: float) -> str:
    """Return 1:05 for 65 seconds, 2:00:00 for two hours."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Counts units of work and prints how many are done and the time left.

    Lines are five seconds apart at first, and a minute apart after half an hour: the log of a night stays readable.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done = what, total, done
        self._first, self._start, self._last = done, time.monotonic(), 0.0

    def advance(self, units: int = 1, note: str = "") -> None:
        """Count finished units; prints when it is time, and always at the end."""
        self.done += units
        now = time.monotonic()
        if self.done >= self.total or now - self._last >= max(5.0, min(60.0, (now - self._start) / 30)):
            self._last = now
            log.info(self._line(now - self._start, note))

    def _line(self, elapsed: float, note: str) -> str:
        finished = self.done - self._first
        left = elapsed / finished * (self.total - self.done) if finished else 0.0
        timing = f"{format_duration(left)} left" if self.done < self.total else f"took {format_duration(elapsed)}"
        return f"{self.what}: {self.done}/{self.total} · {timing}{f' · {note}' if note else ''}"
