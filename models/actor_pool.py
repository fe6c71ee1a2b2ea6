"""A pool of Ray actors that loses no work: least loaded first, bounded in flight, done again when an actor dies.

`ray.util.ActorPool` loses a dead actor for good; this one replaces it. Calls must be idempotent, since
a call whose actor died may have been done. An error that the actor itself raises is not retried:
it would come again, and it reaches the caller as its cause.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from configs.errors import RunError
from data.progress import say


class ActorPoolError(RunError):
    """A call that could not be done, with what happened last."""


@dataclass
class _Call:
    method: str
    args: tuple
    future: Future
    attempts: int = 0
    deadline: float = float("inf")


@dataclass
class _Replica:
    number: int
    handle: Any
    in_flight: dict[int, _Call] = field(default_factory=dict)


class ActorPool:
    """`size` replicas made by `make_actor(number)`; `submit` returns a future at once.

    One dispatcher thread owns all state; completions and new calls reach it through one queue.
    """

    def __init__(
        self,
        make_actor: Callable[[int], Any],
        size: int,
        name: str,
        max_in_flight: int = 2,
        max_attempts: int = 3,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.name = name
        self._make_actor = make_actor
        self._max_in_flight, self._max_attempts = max_in_flight, max_attempts
        self._timeout = timeout_seconds
        self._events: queue.Queue[tuple] = queue.Queue()
        self._waiting: deque[_Call] = deque()
        self._tickets = itertools.count()
        self.num_respawns = 0
        self._replicas = [_Replica(number, make_actor(number)) for number in range(size)]
        self._thread = threading.Thread(target=self._run, name=f"{name}-dispatcher", daemon=True)
        self._thread.start()

    def submit(self, method: str, *args: Any) -> Future:
        """Call a method of some replica; the future holds its result or raises."""
        call = _Call(method, args, Future())
        self._events.put(("submit", call))
        return call.future

    def handles(self) -> list[Any]:
        """The actors as they are now, for tests that kill them."""
        return [replica.handle for replica in self._replicas]

    def close(self) -> None:
        """Kill the actors; calls that are not done raise ActorPoolError."""
        self._events.put(("close",))
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._seconds_to_deadline())
            except queue.Empty:
                self._kill_overdue()
                continue
            if event[0] == "close":
                return self._shut_down()
            if event[0] == "submit":
                self._waiting.append(event[1])
            else:
                self._finish(*event[1:])
            self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            replica = min(self._replicas, key=lambda r: (len(r.in_flight), r.number))
            if len(replica.in_flight) >= self._max_in_flight:
                return
            self._start(replica, self._waiting.popleft())

    def _start(self, replica: _Replica, call: _Call) -> None:
        ticket = next(self._tickets)
        call.attempts += 1
        # Calls of one replica queue up behind each other, so each waits for those before it too.
        call.deadline = time.monotonic() + self._timeout * (len(replica.in_flight) + 1)
        replica.in_flight[ticket] = call
        reference = getattr(replica.handle, call.method).remote(*call.args)
        reference.future().add_done_callback(
            lambda done, replica=replica, ticket=ticket: self._events.put(("done", replica, ticket, done))
        )

    def _finish(self, replica: _Replica, ticket: int, done: Future) -> None:
        call = replica.in_flight.pop(ticket, None)
        if call is None:  # its replica was replaced, and the call was given to another
            return
        error = done.exception()
        if error is None:
            call.future.set_result(done.result())
        elif isinstance(error, RayTaskError):
            call.future.set_exception(error.as_instanceof_cause())
        elif isinstance(error, RayError):
            replica.in_flight[ticket] = call
            self._replace(replica, error)
        else:
            call.future.set_exception(error)

    def _replace(self, replica: _Replica, error: BaseException) -> None:
        """Start a new actor in a dead one's place and give its calls back to the queue, in order."""
        say(f"{self.name} {replica.number} died ({type(error).__name__}); starting another")
        self.num_respawns += 1
        ray.kill(replica.handle)
        calls = [replica.in_flight[ticket] for ticket in sorted(replica.in_flight)]
        replica.in_flight.clear()  # what the dead one still reports of them does not count
        self._replicas[replica.number] = _Replica(replica.number, self._make_actor(replica.number))
        for call in reversed(calls):
            if call.attempts >= self._max_attempts:
                call.future.set_exception(
                    ActorPoolError(f"{self.name}: {call.method} failed {call.attempts} times; last: {error}")
                )
            else:
                self._waiting.appendleft(call)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [call.deadline for replica in self._replicas for call in replica.in_flight.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for replica in list(self._replicas):
            if any(call.deadline <= now for call in replica.in_flight.values()):
                self._replace(replica, TimeoutError(f"no answer within {self._timeout:g} s"))
        self._dispatch()

    def _shut_down(self) -> None:
        open_calls = [*self._waiting, *(c for r in self._replicas for c in r.in_flight.values())]
        for replica in self._replicas:
            ray.kill(replica.handle)
        for call in open_calls:
            call.future.set_exception(ActorPoolError(f"{self.name} was closed before {call.method} was done"))
