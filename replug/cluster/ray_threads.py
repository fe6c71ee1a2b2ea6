"""Threads that call Ray. They are waited for before it ends: a call after that ends the process, with status 1."""

import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

SECONDS = 5.0  # for all of them; one that waits for what hangs is left behind

_threads: "WeakSet[threading.Thread]" = WeakSet()


def start_ray_thread(target: Callable[..., None], *args: Any, name: str) -> None:
    """A daemon thread."""
    thread = threading.Thread(target=target, args=args, daemon=True, name=name)
    _threads.add(thread)
    thread.start()


def note_ray_thread() -> None:
    """That this thread, which somebody else started, calls Ray."""
    _threads.add(threading.current_thread())


def wait_for_ray_threads(seconds: float = SECONDS) -> None:
    """Until all of them have ended, or the time is over."""
    end = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
