"""Work done at once, and work done beside: two ways of getting a Future."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

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
    threading.Thread(target=_settle, args=(done, work), daemon=True, name=name).start()
    return done


def _settle(done: "Future[Result]", work: Callable[[], Result]) -> None:
    if not done.set_running_or_notify_cancel():  # whoever asked for it does not want it any more
        return
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - whatever stopped it is the caller's to see, by the future
        done.set_exception(error)
