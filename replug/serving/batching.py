"""Requests that wait together are computed together.

A queue makes one call at a time, in a thread that it may share with queues that use the same models. A call takes the
request that has waited longest, and those behind it that have the same key: what may not differ within a call, such as
how an answer is decoded. A request whose client has gone is taken out, and its result, if it is being computed, is
dropped.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from replug.cluster.background import attempt
from replug.serving.errors import ApiError
from replug.serving.metrics import Metrics

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")

GATHER_SECONDS = 0.005  # after the first request: clients that were answered together ask again together


@dataclass(frozen=True, slots=True)
class Work(Generic[Key, Item, Result]):
    """A queue's name, what computes requests of one key, in order, and how much goes into a call."""

    name: str
    run: Callable[[Key, Sequence[Item]], Sequence[Result]]
    size: Callable[[Item], int]
    max_size: int


@dataclass(frozen=True, slots=True, eq=False)
class _Call(Generic[Key, Item, Result]):
    key: Key
    item: Item
    future: "asyncio.Future[Result]"


class BatchQueue(Generic[Key, Item, Result]):
    """Made and used on one event loop, until it is closed."""

    def __init__(self, work: Work[Key, Item, Result], thread: ThreadPoolExecutor, metrics: Metrics) -> None:
        self._work, self._thread, self._batches = work, thread, metrics.batches.labels(work.name)
        self._waiting: list[_Call[Key, Item, Result]] = []
        self._filled = asyncio.Event()
        self._runner = asyncio.create_task(self._run())
        metrics.watch_queue(work.name, lambda: len(self._waiting))

    async def submit(self, key: Key, item: Item) -> Result:
        """Raises what computing it raised. One that is cancelled leaves the queue."""
        if self._runner.done():
            raise ApiError(503, "the server is stopping", code="stopping", retries=True)
        call: _Call[Key, Item, Result] = _Call(key, item, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._filled.set()
        try:
            return await call.future
        finally:
            with suppress(ValueError):  # it was taken
                self._waiting.remove(call)

    async def close(self) -> None:
        """Nobody waits any more: the server has answered all that it took. The thread is its owner's to end."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(GATHER_SECONDS)
            calls = self._take()
            if not self._waiting:
                self._filled.clear()
            if calls:
                self._batches.observe(len(calls))
                outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._outcomes, calls)
                _hand_out(calls, outcomes)

    def _take(self) -> list[_Call[Key, Item, Result]]:
        """What is computed next: one that is too large for a call has one for itself."""
        calls: list[_Call[Key, Item, Result]] = []
        room = self._work.max_size
        for call in [one for one in self._waiting if one.key == self._waiting[0].key]:
            room -= self._work.size(call.item)
            if calls and room < 0:
                break
            calls.append(call)
        self._waiting = [one for one in self._waiting if one not in calls]
        return calls

    def _outcomes(self, calls: Sequence[_Call[Key, Item, Result]]) -> list[Any]:
        """A result or an error of each. Where one spoils a call, each is computed alone and has its own."""
        items = [call.item for call in calls]
        found = attempt(self._work.run, calls[0].key, items)
        if isinstance(found, Exception):
            return [found] if len(calls) == 1 else [self._outcomes([call])[0] for call in calls]
        return list(found)


def _hand_out(calls: Sequence[_Call], outcomes: Sequence[Any]) -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        if call.future.done():  # its client has gone
            continue
        if isinstance(outcome, Exception):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)
