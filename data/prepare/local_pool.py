"""Jobs on several processes of this machine; on a cluster Ray takes its place (`cluster/ray_cluster.py`)."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Protocol

from replug.config.errors import RunError

Job = tuple[Any, ...]


class Pool(Protocol):
    """Runs a function over jobs; results come as they are ready. Jobs are drawn one by one, when there is room."""

    def run(self, function: Callable, jobs: Iterable[Job]) -> Iterator[Any]: ...


class LocalPool:
    """`num_workers` processes that end with the block, or this one alone."""

    def __init__(self, num_workers: int = 1) -> None:
        self._num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "LocalPool":
        if self._num_workers > 1:
            self._executor = ProcessPoolExecutor(self._num_workers, get_context("spawn"), _begin, (os.getpid(),))
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, function: Callable, jobs: Iterable[Job]) -> Iterator[Any]:
        """Yield results as they are ready. Raises RunError if a process was killed; what was finished is kept."""
        if self._executor is None:
            yield from (function(*job) for job in jobs)
            return
        try:
            yield from _in_flight(self._executor, function, iter(jobs), self._num_workers + 1)
        except BrokenProcessPool as error:
            raise RunError(
                "a process of data.num_workers was killed, perhaps for want of memory; what it had finished is kept: "
                "run the same command again, with fewer data.num_workers if it comes back"
            ) from error


def _in_flight(executor: ProcessPoolExecutor, function: Callable, jobs: Iterator[Job], number: int) -> Iterator[Any]:
    running: set[Future] = set()
    while True:
        while len(running) < number and (job := next(jobs, None)) is not None:
            running.add(executor.submit(function, *job))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def _begin(parent: int) -> None:
    """Give each process one core, and let none stay behind when the parent is killed."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()
