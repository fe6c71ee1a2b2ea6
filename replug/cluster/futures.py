"""Work done at once, and work done beside: two ways of getting a Future, and what came of one."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar

from replug.cluster.ray_threads import start_ray_thread

Result = TypeVar("Result")


class InlineExecutor(Executor):
    """Runs what is submitted before it returns."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        done: Future[Result] = Future()
        _settle(done, lambda: fn(*args, **kwargs))
        return done


def in_background(work: Callable[[], Result], name: str) -> "Future[Result]":
    """In a thread of its own, which does not keep the process from ending."""
    done: Future[Result] = Future()
    start_ray_thread(_settle, done, work, name=name)
    return done


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the error it raised."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for the result
        return error


def outcome(done: "Future[Result]") -> Result | BaseException:
    """What a finished future holds: its result, or why there is none."""
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
