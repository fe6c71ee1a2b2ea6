"""Pre-emption: the effect of SIGTERM, SIGUSR1, a closed terminal (SIGHUP) and Ctrl-C on a run.

Outside the training steps all results are on disk, so the process ends at once. During the steps the signal is
remembered; the next boundary, or the current wait, raises, and the step is saved. A main thread that waits inside a
library runs no Python, so a second thread receives the signal too, and ends the process when its time is over.

In a user's program Ctrl-C raises KeyboardInterrupt, as in Python, instead of ending the process. A run outside the main
thread handles no signals.

Ray's agents outlive a killed raylet by up to a minute, so this process kills its own.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
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

EXIT_STATUS = 75  # EX_TEMPFAIL: the same command resumes
CTRL_C_STATUS = 130  # as shells have it: 128 and the signal's number
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LOOK_SECONDS = 0.2  # between checks for a signal or another end of a wait
# From the signal until the process has ended. SLURM kills 30 s after SIGTERM by default; our job scripts ask it for
# SIGUSR1 120 s before the end. Nothing kills after Ctrl-C, and a second Ctrl-C ends the wait.
SECONDS_TO_END = {signal.SIGTERM: 25.0, signal.SIGUSR1: 110.0, signal.SIGHUP: 25.0, signal.SIGINT: 110.0}
assert set(SECONDS_TO_END) == set(SIGNALS)
SAVING = "replug: Ctrl-C: saving the current step; a second Ctrl-C ends at once, without it"


class Interruption:
    """Signal handling of a process. `check` raises Interrupted after a signal came while it was `deferred`."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._signal: int | None = None
        self._numbers: tuple[int, ...] = ()
        self._of_terminal: list[int] = []
        self._heard: list[int] = []
        self._describe: Callable[[], str] = str
        self._ended, self._is_timed = threading.Event(), False
        self._raises = False  # KeyboardInterrupt on Ctrl-C: in a user's program, not on the command line
        self._wakeup: socket.socket | None = None  # Python writes signal numbers to it even while C code runs

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the handlers of the signals; Ray's own handler raises where its error may be swallowed.

        The process ends in time only while the outermost of these blocks runs. Outside the main thread nothing is
        installed, since Python does not allow it.
        """
        if self._wakeup is not None or threading.current_thread() is not threading.main_thread():
            self.install()
            yield
            return
        self._raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:  # by nohup
            del before[signal.SIGHUP]
        self._numbers = tuple(before)
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
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    @contextmanager
    def deferred(self, describe: Callable[[], str] = str) -> Iterator[None]:
        """Let signals wait for `check` while the block runs.

        `describe` returns the saved state, for the message of a forced end; it must not wait for other processes.
        """
        self._is_deferred, self._describe = True, describe
        try:
            yield
        finally:
            self._is_deferred = False

    def check(self) -> None:
        if self._signal is not None:
            raise Interrupted(f"interrupted by {_called(self._signal)}; the same command resumes", self._signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C in a user's program: defer it or raise KeyboardInterrupt. `_listen` handles all else."""
        if self._is_pythons(number):
            if self._ends_at_once(number):
                raise KeyboardInterrupt
            self._ask(number)

    def _listen(self, own: socket.socket) -> None:
        """Receive signals in a thread: the main thread may be inside a library, where it runs no handler."""
        while byte := own.recv(1):
            if byte[0] in SIGNALS and not self._is_pythons(byte[0]):
                self._on_byte(byte[0])

    def _on_byte(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._ends_at_once(number):
            _say(f"replug: interrupted by {_called(number)}; finished work is kept; run the same command again")
            end_process(number)
        self._ask(number)
        if not self._is_timed:  # in another thread: this one receives a second Ctrl-C
            self._is_timed = True
            threading.Thread(target=self._end_in_time, args=(number,), daemon=True, name="interruption-time").start()

    def _ask(self, number: int) -> None:
        """Make the next `check` raise. Further signals change nothing, but a second Ctrl-C ends at once."""
        if number == signal.SIGINT:
            _say(SAVING)
        self._signal = self._signal or number

    def _leave_terminal(self) -> None:
        """Redirect output from the closed terminal to /dev/null: every line would raise an error there."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in self._of_terminal:
            os.dup2(nowhere, stream)
        os.close(nowhere)

    def _is_pythons(self, number: int) -> bool:
        return self._raises and number == signal.SIGINT

    def _ends_at_once(self, number: int) -> bool:
        """Return whether there is nothing to save, or the user does not wait for it."""
        is_again = number == signal.SIGINT and number in self._heard
        self._heard.append(number)
        return is_again or (self._signal is None and not self._is_deferred)

    def _end_in_time(self, number: int) -> None:
        seconds = SECONDS_TO_END[signal.Signals(number)]
        if not self._ended.wait(seconds):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            while frame is not None and not str(frame.f_globals.get("__name__")).startswith("replug."):
                frame = frame.f_back
            place = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}" if frame else "its start"
            state = "; ".join(filter(None, [f"after {seconds:g} s it still waits in {place}", self._describe()]))
            _say(f"replug: interrupted by {_called(number)}; {state}; the same command resumes")
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
