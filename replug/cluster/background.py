"""Work beside the caller: futures that are filled in a thread, and threads that call Ray.

Threads that call Ray are waited for before Ray ends: a call after that ends the process with status 1.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar
from weakref import WeakSet

SECONDS = 5.0  # for all of them; one that waits for what hangs is left behind

_threads: "WeakSet[threading.Thread]" = WeakSet()


def start_ray_thread(target: Callable[..., None], *args: Any, name: str) -> None:
    """Start a daemon thread that calls Ray."""
    thread = threading.Thread(target=target, args=args, daemon=True, name=name)
    _threads.add(thread)
    thread.start()


def note_ray_thread() -> None:
    """Note that this thread, which somebody else started, calls Ray."""
    _threads.add(threading.current_thread())


def wait_for_ray_threads(seconds: float = SECONDS) -> None:
    """Wait until all of them have ended, or the time is over."""
    end = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


Result = TypeVar("Result")


class InlineExecutor(Executor):
    """Runs what is submitted before `submit` returns."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        done: Future[Result] = Future()
        _settle(done, lambda: fn(*args, **kwargs))
        return done


def in_background(work: Callable[[], Result], name: str) -> "Future[Result]":
    """Run work in a daemon thread of its own."""
    done: Future[Result] = Future()
    start_ray_thread(_settle, done, work, name=name)
    return done


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or the error it raised."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for the result
        return error


def outcome(done: "Future[Result]") -> Result | BaseException:
    """Return what a finished future holds: its result or its error."""
    if done.cancelled():
        return CancelledError()
    return done.exception() or done.result()


def _settle(done: "Future[Result]", work: Callable[[], Result]) -> None:
    if not done.set_running_or_notify_cancel():  # whoever asked for it does not want it any more
        return
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - whatever stopped it is the caller's to see, by the future
        done.set_exception(error)
