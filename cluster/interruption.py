"""Pre-emption: what SIGTERM, SIGUSR1 and Ctrl-C do to a run.

Outside the training steps everything that counts is on disk already, so the process ends at once. Between
them the signal is remembered; the next boundary, or the wait that is under way, raises, and the step is saved.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from replug.configs.errors import Interrupted

Result = TypeVar("Result")

EXIT_STATUS = 75  # EX_TEMPFAIL: the same command goes on
CTRL_C_STATUS = 130  # as shells have it: 128 and the signal's number
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LOOK_SECONDS = 0.2  # between two looks at the signal, and at what else may end a wait


class Interruption:
    """One for a process. `check` raises Interrupted once a signal came while it was `deferred`."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._asked: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of whoever handles the signals; Ray's own handler raises where it may be swallowed."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While the block runs a signal waits for `check`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def check(self) -> None:
        if self._asked is not None:
            name = "Ctrl-C" if self._asked == signal.SIGINT else signal.Signals(self._asked).name
            raise Interrupted(f"interrupted by {name}; the same command goes on", self._asked)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Further signals change nothing: a job's script and SLURM itself may both send one. A second Ctrl-C ends."""
        is_again = number == signal.SIGINT == self._asked
        if not self._is_deferred or is_again:
            os._exit(exit_status(number))
        if number == signal.SIGINT:
            os.write(2, b"replug: Ctrl-C: saving the step that is under way; again ends at once, without it\n")
        self._asked = number


def exit_status(number: int) -> int:
    """Of a process that a signal ended."""
    return CTRL_C_STATUS if number == signal.SIGINT else EXIT_STATUS


def ignore_signals() -> None:
    """For a process that ends with the one that was started: only that one decides."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def wait_for(future: "Future[Result]", check: Callable[[], None]) -> Result:
    """The future's result; `check` is called all the while, and what it raises ends the wait."""
    while not wait([future], timeout=LOOK_SECONDS).done:
        check()
    return future.result()
