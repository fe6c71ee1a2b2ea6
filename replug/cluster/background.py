"""Work beside the caller: futures that are filled in a thread, and threads that call Ray.

Ray ends only after the threads that call it: a later call would end the process with status 1.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar
from weakref import WeakSet

SECONDS = 5.0  # for all threads together; hanging threads are left behind

_threads: "WeakSet[threading.Thread]" = WeakSet()


def start_ray_thread(target: Callable[..., None], *args: Any, name: str) -> None:
    """Start a daemon thread that calls Ray."""
    thread = threading.Thread(target=target, args=args, daemon=True, name=name)
    _threads.add(thread)
    thread.start()


def note_ray_thread() -> None:
    """Register the current thread, started elsewhere, as a caller of Ray."""
    _threads.add(threading.current_thread())


def wait_for_ray_threads(seconds: float = SECONDS) -> None:
    """Wait until all these threads have ended, at most `seconds`."""
    end = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


Result = TypeVar("Result")


class InlineExecutor(Executor):
    """An executor that runs each call inside `submit`."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        done: Future[Result] = Future()
        _settle(done, lambda: fn(*args, **kwargs))
        return done


def in_background(work: Callable[[], Result], name: str) -> "Future[Result]":
    """Run work in a separate daemon thread."""
    done: Future[Result] = Future()
    start_ray_thread(_settle, done, work, name=name)
    return done


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or the error it raised."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - returned to the caller
        return error


def outcome(done: "Future[Result]") -> Result | BaseException:
    """Return the result or the error of a finished future."""
    if done.cancelled():
        return CancelledError()
    return done.exception() or done.result()


def _settle(done: "Future[Result]", work: Callable[[], Result]) -> None:
    if not done.set_running_or_notify_cancel():  # the caller cancelled it
        return
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - the future raises it for the caller
        done.set_exception(error)
