"""Pre-emption: what SIGTERM, SIGUSR1, a closed terminal (SIGHUP) and Ctrl-C do to a run.

Outside the training steps everything that counts is on disk, so the process ends at once. During them the signal is
remembered; the next boundary, or the wait that is under way, raises, and the step is saved. A main thread that waits
inside a library runs no Python. So a thread hears of the signal too, and ends the process when its time is over.

In a program of the user's Ctrl-C ends no process: where it would, KeyboardInterrupt is raised, as Python does. Another
thread than the main one hears of no signal at all.

Ray's agents outlive a raylet that was killed by up to a minute, so this process kills those that it has made.
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
    """Return the processes below this one that Ray has named: agents and workers of its clusters."""
    children = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::"):
                children.append(process)
    return children


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


Result = TypeVar("Result")

EXIT_STATUS = 75  # EX_TEMPFAIL: the same command goes on
CTRL_C_STATUS = 130  # as shells have it: 128 and the signal's number
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LOOK_SECONDS = 0.2  # between two looks at the signal, and at what else may end a wait
# From the signal until the process has ended. SLURM kills 30 s after SIGTERM by default; our job scripts ask it for
# SIGUSR1 120 s before the end. After Ctrl-C nobody kills, and whoever does not want to wait presses it again.
SECONDS_TO_END = {signal.SIGTERM: 25.0, signal.SIGUSR1: 110.0, signal.SIGHUP: 25.0, signal.SIGINT: 110.0}
assert set(SECONDS_TO_END) == set(SIGNALS)
SAVING = "replug: Ctrl-C: saving the step that is under way; again ends at once, without it"


class Interruption:
    """One for a process. `check` raises Interrupted once a signal came while it was `deferred`."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._signal: int | None = None
        self._numbers: tuple[int, ...] = ()
        self._of_terminal: list[int] = []
        self._heard: list[int] = []
        self._describe: Callable[[], str] = str
        self._ended, self._is_timed = threading.Event(), False
        self._raises = False  # KeyboardInterrupt, since Ctrl-C is Python's own: not on the command line
        self._wakeup: socket.socket | None = None  # Python writes the numbers of signals to it, whatever is running

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of whoever handles the signals; Ray's own handler raises where it may be swallowed.

        The process ends in time only while the outermost of these blocks runs. In another thread than the main one
        nothing is installed, for Python sets handlers there alone.
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
        self._of_terminal = [stream for stream in (0, 1, 2) if os.isatty(stream)]  # one that is closed does not say
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
        """While the block runs a signal waits for `check`.

        `describe` says what is saved where the process has to be ended; it asks nobody who may not answer.
        """
        self._is_deferred, self._describe = True, describe
        try:
            yield
        finally:
            self._is_deferred = False

    def check(self) -> None:
        if self._signal is not None:
            raise Interrupted(f"interrupted by {_called(self._signal)}; the same command goes on", self._signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Hear of Ctrl-C in a user's program, whose second one is Python's own. `_listen` hears of all else."""
        if self._is_pythons(number):
            if self._ends_at_once(number):
                raise KeyboardInterrupt
            self._ask(number)

    def _listen(self, own: socket.socket) -> None:
        """Hear of signals in a thread: the main thread may be where it runs no handler."""
        while byte := own.recv(1):
            if byte[0] in SIGNALS and not self._is_pythons(byte[0]):
                self._on_byte(byte[0])

    def _on_byte(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._ends_at_once(number):
            _say(f"replug: interrupted by {_called(number)}; what is finished is kept, run the same command again")
            end_process(number)
        self._ask(number)
        if not self._is_timed:  # in a thread of its own, since this one hears of a second Ctrl-C
            self._is_timed = True
            threading.Thread(target=self._end_in_time, args=(number,), daemon=True, name="interruption-time").start()

    def _ask(self, number: int) -> None:
        """Have the next `check` raise. Further signals change nothing, but a second Ctrl-C ends at once."""
        if number == signal.SIGINT:
            _say(SAVING)
        self._signal = self._signal or number

    def _leave_terminal(self) -> None:
        """Write nowhere instead of to the terminal that is gone, where every line would raise an error."""
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
            _say(f"replug: interrupted by {_called(number)}; {state}; the same command goes on")
            end_process(number)


def end_process(number: int) -> None:
    """End this process at once, and of its children those that are stopped, and Ray's; others end by themselves."""
    kill(ray_children())
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
    os._exit(exit_status(number))


def _called(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(line: str) -> None:
    """Not through a logger or a stream: the main thread may hold their locks."""
    os.write(2, f"{line}\n".encode())


def exit_status(number: int) -> int:
    """Return the status of a process that a signal ended."""
    return CTRL_C_STATUS if number == signal.SIGINT else EXIT_STATUS


def ignore_signals() -> None:
    """Ignore signals in a process that ends with another: only that one decides."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def wait_for(future: "Future[Result]", check: Callable[[], None]) -> Result:
    """Return the future's result. Call `check` all the while; what it raises ends the wait."""
    while not wait([future], timeout=LOOK_SECONDS).done:
        check()
    return future.result()
