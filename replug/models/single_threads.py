"""Passes of a model on a CPU, side by side and each on one thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import torch


def one_per_thread(run: Callable[[list[int]], None], batches: list[list[int]]) -> None:
    """Run batches side by side, each on one thread.

    Threads that share one batch wait for each other after every operation. That costs a little on an idle machine,
    and most of the time where another process holds a core.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(batches) == 1:
        for batch in batches:
            run(batch)
    else:
        list(_single_threads(threads).map(run, batches))


@cache
def _single_threads(count: int) -> ThreadPoolExecutor:
    """Threads that compute alone. What one of them sets holds for all threads to come, so it is put back at once."""
    threads, started = torch.get_num_threads(), Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes its number at its first look, which must not come later
        started.wait()

    pool = ThreadPoolExecutor(count, initializer=begin)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)
    return pool
