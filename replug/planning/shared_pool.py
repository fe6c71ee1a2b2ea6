"""A pool of processes on GPUs that others share, which hands out work as `cluster.actor_pool` does.

The least loaded is given the next unit. Each has two calls, of which one computes. So a process on a busy GPU, which
ends fewer units, is given fewer.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import simpy

from replug.planning.sharing import Processor

CALLS_AT_ONCE = 2  # models/scorer_pool.py, index_workers/service.py


class Ledger(Protocol):
    """The run, which notes who works when."""

    @property
    def now(self) -> float: ...

    def note(self, role: str, began: float, seconds: float) -> None: ...


@dataclass(slots=True)
class Batch:
    """Units that were submitted together, of so many seconds on a GPU of one's own."""

    seconds: float
    waiting: int
    unfinished: int
    done: simpy.Event


@dataclass(slots=True)
class Server:
    """One process. `credit` are seconds of the unit at work that were noted already, `total` of all that it ended."""

    processor: Processor
    held: int = 0
    at_work: Batch | None = None
    next: Batch | None = None
    working: simpy.Event | None = None
    began: float = 0.0
    credit: float = 0.0
    total: float = 0.0


class SharedPool:
    """Processes of one role."""

    def __init__(self, run: Ledger, role: str, processors: Sequence[Processor], unit_seconds: float = 0.0) -> None:
        self._run, self._role, self._unit_seconds = run, role, unit_seconds
        self.servers = [Server(processor) for processor in processors]
        self.queue: deque[Batch] = deque()
        # Numbers of servers by how many units they have; one that has another number by now is passed over.
        self._free = [list(range(len(self.servers))), *([] for _ in range(CALLS_AT_ONCE - 1))]

    @property
    def waiting(self) -> int:
        """Units that no process was given yet."""
        return sum(batch.waiting for batch in self.queue)

    @property
    def is_working(self) -> bool:
        return any(server.working is not None for server in self.servers)

    def submit(self, units: int, done: simpy.Event, unit_seconds: float | None = None) -> None:
        seconds = self._unit_seconds if unit_seconds is None else unit_seconds
        self.queue.append(Batch(seconds, units, units, done))
        self._dispatch()

    def done_seconds(self) -> list[float]:
        """Of every process: what it ended, and what it has done of the unit at work."""
        return [server.total + self._progress(server) for server in self.servers]

    def advance(self, server: Server, seconds: float) -> None:
        """So much of a process's work is done at a stroke, units from the queue among it."""
        batch, working = server.at_work, server.working
        assert batch is not None and working is not None, "only a process at work goes on"
        done = self._progress(server) + seconds
        whole = min(int(done / batch.seconds), batch.waiting)
        for _ in range(whole):
            self._take()
        batch.unfinished -= whole
        server.total += whole * batch.seconds
        server.credit += seconds - whole * batch.seconds
        server.processor.change(working, max(1e-6 * batch.seconds, (whole + 1) * batch.seconds - done))

    def _progress(self, server: Server) -> float:
        if server.working is None or server.at_work is None:
            return 0.0
        return server.at_work.seconds - server.processor.left(server.working)

    def _dispatch(self) -> None:
        while self.queue and (number := self._least_loaded()) is not None:
            server, batch = self.servers[number], self._take()
            server.held += 1
            if server.held < CALLS_AT_ONCE:
                heapq.heappush(self._free[server.held], number)
            if server.working is None:
                self._begin(server, number, batch)
            else:
                server.next = batch

    def _least_loaded(self) -> int | None:
        for held, numbers in enumerate(self._free):
            while numbers:
                number = heapq.heappop(numbers)
                if self.servers[number].held == held:
                    return number
        return None

    def _take(self) -> Batch:
        batch = self.queue[0]
        batch.waiting -= 1
        if not batch.waiting:
            self.queue.popleft()
        return batch

    def _begin(self, server: Server, number: int, batch: Batch) -> None:
        server.at_work, server.next, server.began = batch, None, self._run.now
        server.working = server.processor.work(batch.seconds, 1.0)
        assert server.working.callbacks is not None
        server.working.callbacks.append(partial(self._finish, server, number))

    def _finish(self, server: Server, number: int, _: simpy.Event) -> None:
        batch, following = server.at_work, server.next
        assert batch is not None
        self._run.note(self._role, server.began, batch.seconds - server.credit)
        server.total += batch.seconds
        server.credit, server.working, server.at_work = 0.0, None, None
        server.held -= 1
        heapq.heappush(self._free[server.held], number)
        if following is not None:
            self._begin(server, number, following)
        batch.unfinished -= 1
        if not batch.unfinished:
            batch.done.succeed()
        self._dispatch()
