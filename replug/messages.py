"""Show messages as lines on standard error while something runs."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from replug.config.plain_text import plain_text
from replug.data import progress

LOGGER = logging.getLogger("replug")


class StandardError(logging.Handler):
    """Prints each message to the current standard error; warnings begin with "warning:"."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        progress.erase()
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"{mark}{plain_text(record.getMessage())}", file=sys.stderr, flush=True)


class CollectedWarnings(logging.Handler):
    """Collects the first warning of each place in the code, for another process that can show it.

    Ray writes an actor's own log to a file.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set()
        self._new: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message unless its place had one."""
        place = f"{record.module}:{record.lineno}"
        if place not in self._seen:
            self._seen.add(place)
            self._new[place] = record.getMessage()

    def take(self) -> dict[str, str]:
        """Return the messages since the last call, by place in the code."""
        new, self._new = self._new, {}
        return new


@contextmanager
def shown_messages() -> Iterator[None]:
    """Show messages while the block runs, unless the program has configured the logger `replug`."""
    if LOGGER.level != logging.NOTSET or LOGGER.isEnabledFor(logging.INFO):
        yield
        return
    handler = StandardError()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and its reports on weights, which replug checks by itself."""
    from transformers.utils import logging as of_transformers

    before, has_bars = of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        of_transformers.set_verbosity(before)
        if has_bars:
            of_transformers.enable_progress_bar()
