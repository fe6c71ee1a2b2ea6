"""What is shown while something runs: messages as lines on standard error, and as bars in a notebook."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from replug.config.plain_text import plain_text
from replug.data import progress
from replug.data.progress import Progress

LOGGER = logging.getLogger("replug")


class StandardError(logging.Handler):
    """Prints a line where standard error is at the moment; a warning begins with that word."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        progress.erase()
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"{mark}{plain_text(record.getMessage())}", file=sys.stderr, flush=True)


class NotebookBars(StandardError):
    """Shows progress as bars, and other messages as lines."""

    def __init__(self) -> None:
        super().__init__()
        self._bars: dict[int, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Move the bar of a `Progress`, or print the message."""
        moved = getattr(record, "progress", None)
        if not isinstance(moved, Progress):
            super().emit(record)
            return
        from tqdm.auto import tqdm

        bar = self._bars.get(id(moved))
        if bar is None:
            bar = self._bars[id(moved)] = tqdm(total=moved.total, desc=moved.what)
        bar.update(moved.done - bar.n)
        if moved.is_done:
            self._bars.pop(id(moved)).close()


@contextmanager
def shown_messages() -> Iterator[None]:
    """Show messages while the block runs, unless the program has chosen what becomes of them."""
    if LOGGER.level != logging.NOTSET or LOGGER.isEnabledFor(logging.INFO):
        yield
        return
    handler = NotebookBars() if "ipykernel" in sys.modules else StandardError()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' reports on weights that replug checks by itself from being shown while the block runs."""
    from transformers.utils import logging as of_transformers

    before = of_transformers.get_verbosity()
    of_transformers.set_verbosity_error()
    try:
        yield
    finally:
        of_transformers.set_verbosity(before)
