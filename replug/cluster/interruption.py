"""Pre-emption: the effect of SIGTERM, SIGUSR1, a closed terminal (SIGHUP) and Ctrl-C on a run.

Outside the training steps all results are on disk, so the process ends at once. During the steps the signal is
remembered; the next boundary, or the current wait, raises, and the step is saved. A main thread that waits inside a
library runs no Python, so a second thread receives the signal too, and ends the process when its time is over.

In a user's program Ctrl-C raises KeyboardInterrupt, as in Python. A run outside the main thread handles no signals.

Ray's agents outlive a killed raylet by up to a minute, so this process kills its own.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

import psutil

from replug.config.errors import Interrupted


def ray_children() -> list[psutil.Process]:
    """Return the descendants of this process that Ray has named: agents and workers of its clusters."""
    children = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::"):
                children.append(process)
    return children


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


Result = TypeVar("Result")

RESUMES = "the same command resumes"
EXIT_STATUS = 75  # EX_TEMPFAIL: the same command resumes
CTRL_C_STATUS = 130  # as shells have it: 128 and the signal's number
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LOOK_SECONDS = 0.2  # between checks for a signal or another end of a wait
# From the signal until the process has ended. SLURM kills 30 s after SIGTERM by default; our job scripts ask it for
# SIGUSR1 120 s before the end. Nothing kills after Ctrl-C, and a second Ctrl-C ends the wait.
SECONDS_TO_END = {signal.SIGTERM: 25.0, signal.SIGUSR1: 110.0, signal.SIGHUP: 25.0, signal.SIGINT: 110.0}
SAVING = "replug: Ctrl-C: saving the current step; a second Ctrl-C ends at once, without it"


class Interruption:
    """Signal handling of a process. `check` raises Interrupted after a signal came while it was `deferred`."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._signal: int | None = None
        self._numbers: list[signal.Signals] = []
        self._of_terminal: list[int] = []
        self._ended = threading.Event()
        self._wakeup: socket.socket | None = None  # Python writes signal numbers to it even while C code runs

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the handlers of the signals; Ray's own handler raises where its error may be swallowed.

        The process ends in time only while the outermost of these blocks runs. Outside the main thread nothing is
        installed, since Python does not allow it, and Python's own Ctrl-C stays.
        """
        if self._wakeup is not None or threading.current_thread() is not threading.main_thread():
            self.install()
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:  # by nohup
            del before[signal.SIGHUP]
        self._numbers = [number for number in before if before[number] is not signal.default_int_handler]
        self._of_terminal = [stream for stream in (0, 1, 2) if os.isatty(stream)]  # now: isatty denies a closed one
        own, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_before = signal.set_wakeup_fd(-1)
        threading.Thread(target=self._listen, args=(own,), daemon=True, name="interruption").start()
        self.install()
        try:
            yield
        finally:
            self._ended.set()
            signal.set_wakeup_fd(wakeup_before)
            self._wakeup.close()
            self._wakeup = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Handle the signals again, after a library took them over; does nothing outside `installed`."""
        if self._wakeup is None:
            return
        for number in self._numbers:
            signal.signal(number, lambda *_: None)  # `_listen` acts
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let signals wait for `check` while the block runs."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def check(self) -> None:
        if self._signal is not None:
            raise Interrupted(f"interrupted by {_called(self._signal)}; {RESUMES}", self._signal)

    def _listen(self, own: socket.socket) -> None:
        """Receive signals in a thread: the main thread may be inside a library, where it runs no handler.

        End at once if there is nothing to save, or at a second Ctrl-C; else let the next `check` raise.
        """
        while byte := own.recv(1):
            number = byte[0]
            if number not in self._numbers:
                continue
            if number == signal.SIGHUP:  # every line to the closed terminal would raise an error
                nowhere = os.open(os.devnull, os.O_RDWR)
                for stream in self._of_terminal:
                    os.dup2(nowhere, stream)
            is_again = number == self._signal == signal.SIGINT
            if is_again or (self._signal is None and not self._is_deferred):
                _say(f"replug: interrupted by {_called(number)}; finished work is kept; run the same command again")
                end_process(number)
            if self._signal is None:
                if number == signal.SIGINT:
                    _say(SAVING)
                self._signal = number
                # In another thread: this one receives a second Ctrl-C.
                threading.Thread(target=self._end_in_time, args=(number,), daemon=True, name="end-in-time").start()

    def _end_in_time(self, number: int) -> None:
        seconds = SECONDS_TO_END[signal.Signals(number)]
        if not self._ended.wait(seconds):
            _say(f"replug: interrupted by {_called(number)}; the step is not saved after {seconds:g} s; {RESUMES}")
            end_process(number)


def end_process(number: int) -> None:
    """End this process, its stopped children and Ray's processes at once; other children end by themselves."""
    kill(ray_children())
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
    os._exit(exit_status(number))


def _called(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(line: str) -> None:
    """Write a line without a logger or a stream: the main thread may hold their locks."""
    os.write(2, f"{line}\n".encode())


def exit_status(number: int) -> int:
    """Return the status of a process that a signal ended."""
    return CTRL_C_STATUS if number == signal.SIGINT else EXIT_STATUS


def ignore_signals() -> None:
    """Ignore signals in a process that ends with another, which alone decides."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def wait_for(future: "Future[Result]", check: Callable[[], None]) -> Result:
    """Return the future's result. Call `check` while waiting; its exception ends the wait."""
    while not wait([future], timeout=LOOK_SECONDS).done:
        check()
    return future.result()
