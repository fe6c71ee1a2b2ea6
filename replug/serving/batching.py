"""Requests that wait together are computed together, and what the server counts, in Prometheus' form.

A queue makes one call at a time, in a thread that it may share with queues that use the same models. A call takes the
request that has waited longest, and those behind it that have the same key: what may not differ within a call, such as
how an answer is decoded. A request whose client has gone is taken out; its result, if it is being computed, is dropped.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from replug.cluster.background import attempt
from replug.serving.requests import ApiError

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")

GATHER_SECONDS = 0.005  # after the first request: clients that were answered together ask again together
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The numbers of one server. Labels are names of the server's own: no request makes a new one."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("replug_requests", "Requests by their status", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "replug_request_seconds", "From a request to its last byte", ["route"], buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("replug_tokens", "Tokens that models read or made", ["kind"], registry=registry)
        self.batches = Histogram(
            "replug_batch_size", "Requests computed in one call", ["queue"], buckets=SIZES, registry=registry
        )
        self.queued = Gauge("replug_queue_length", "Requests that wait for a call", ["queue"], registry=registry)
        self.under_way = Gauge("replug_requests_under_way", "Requests that are admitted", registry=registry)
        self.version = Gauge("replug_index_version", "The version that is searched", registry=registry)
        self.swaps = Counter("replug_index_swaps", "Looks that found another version", ["outcome"], registry=registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class BatchQueue(Generic[Key, Item, Result]):
    """Computes requests by `run(key, items)`, in calls of items whose sizes sum to at most `max_size`.

    Made and used on one event loop, until it is closed. The thread is its owner's to end.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Key, Sequence[Item]], Sequence[Result]],
        max_size: int,
        thread: ThreadPoolExecutor,
        metrics: Metrics,
        size: Callable[[Item], int] = lambda item: 1,
    ) -> None:
        self._compute, self._max_size, self._size, self._thread = run, max_size, size, thread
        self._waiting: list[tuple[Key, Item, asyncio.Future[Result]]] = []
        self._filled = asyncio.Event()
        self._runner = asyncio.create_task(self._run())
        self._batches = metrics.batches.labels(name)
        metrics.queued.labels(name).set_function(lambda: len(self._waiting))

    async def submit(self, key: Key, item: Item) -> Result:
        """Return the result, or raise what computing it raised. A submission that is cancelled leaves the queue."""
        if self._runner.done():
            raise ApiError(503, "the server is stopping", code="stopping", retries=True)
        call = key, item, asyncio.get_running_loop().create_future()
        self._waiting.append(call)
        self._filled.set()
        try:
            return await call[2]
        finally:
            with suppress(ValueError):  # it was taken
                self._waiting.remove(call)

    async def close(self) -> None:
        """Stop. Nobody waits any more: the server has answered all that it took."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(GATHER_SECONDS)
            key, items, futures = self._take()
            if not self._waiting:
                self._filled.clear()
            if not items:
                continue
            self._batches.observe(len(items))
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._outcomes, key, items)
            for future, outcome in zip(futures, outcomes, strict=True):
                if future.done():  # its client has gone
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _take(self) -> tuple[Any, list[Item], "list[asyncio.Future[Result]]"]:
        """Take the next call out of the queue. An item that is too large for a call has one for itself."""
        taken: list[tuple[Key, Item, asyncio.Future[Result]]] = []
        room = self._max_size
        for call in [one for one in self._waiting if one[0] == self._waiting[0][0]]:
            room -= self._size(call[1])
            if taken and room < 0:
                break
            taken.append(call)
        futures = [future for _, _, future in taken]
        self._waiting = [one for one in self._waiting if one[2] not in futures]
        return (taken[0][0] if taken else None), [item for _, item, _ in taken], futures

    def _outcomes(self, key: Key, items: Sequence[Item]) -> list[Any]:
        """Return a result or an error for each. Where one spoils a call, each is computed alone and has its own."""
        found = attempt(self._compute, key, items)
        if isinstance(found, Exception):
            return [found] if len(items) == 1 else [self._outcomes(key, [item])[0] for item in items]
        return list(found)
