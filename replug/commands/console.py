"""What our own loggers say, on the command line: one line each to standard error, so that standard output is free.

A program that uses `replug` as a library decides for itself what becomes of the logger `replug`.
"""

import logging
import sys

from replug.config.plain_text import plain_text


class _StandardError(logging.Handler):
    """Prints where standard error is at the moment; a warning begins with that word."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"{mark}{plain_text(record.getMessage())}", file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Show what replug does, once, however often it is called."""
    logger = logging.getLogger("replug")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        logger.addHandler(_StandardError())
