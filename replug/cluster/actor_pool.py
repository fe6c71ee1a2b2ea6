"""A pool of Ray actors that loses no work: least loaded first, bounded in flight, calls repeated when an actor dies.

Calls must be idempotent: an actor may die after it has done a call. Errors that the actor itself raises are not
retried. A fault of its GPU counts as the actor's death, since no later result can be trusted.

A replica has a time-out from its launch until it has answered `probe`, where slow work belongs, such as loading a
model. A replica that cannot start, finds no room in the cluster, or fails its probe is quarantined; calls fail when
none is left.
"""

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from replug.cluster.environment import torch_environment
from replug.config.errors import RunError, UserError

log = logging.getLogger(__name__)


# Times in a row that a replica may fail to start: its GPU's memory may still be held, or its node may leave.
MAX_FAILED_STARTS = 5
# Marks of CUDA libraries' errors, which are plain RuntimeErrors; torch's own errors have a class.
DEVICE_FAULTS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "CUSOLVER_STATUS", "CUSPARSE_STATUS", "NCCL error")
# A failed allocation is not a fault: the device still works.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
LOOK_SECONDS = 0.5  # between checks for overdue calls and starts


class ActorPoolError(RunError):
    """A failed call, with its last error."""


@dataclass
class _Call:
    method: str
    args: tuple
    future: Future
    times: int = 1
    attempts: int = 0
    deadline: float = float("inf")


@dataclass
class _Replica:
    number: int
    handle: Any
    start_deadline: float
    failed_starts: int = 0
    is_up: bool = False
    in_flight: dict[int, _Call] = field(default_factory=dict)


class ActorPool:
    """Up to `size` replicas made by `make_actor(number)`; `submit` returns a future at once.

    `validate(number, result)` takes the result of a new replica's `probe` method and returns a problem, or None.
    One dispatcher thread owns all state; completions and new calls reach it through one queue. A call's future cannot
    be cancelled once a replica has it.
    """

    def __init__(
        self,
        make_actor: Callable[[int], Any],
        size: int,
        name: str,
        max_in_flight: int = 2,
        max_attempts: int = 3,
        timeout_seconds: float = 600.0,
        start_timeout_seconds: float = 1800.0,
        validate: Callable[[int, Any], str | None] | None = None,
    ) -> None:
        self.name = name
        self.num_retries = self.num_respawns = 0  # since the start
        self._make_actor, self._validate = make_actor, validate
        self._max_in_flight, self._max_attempts = max_in_flight, max_attempts
        self._timeout, self._start_timeout = timeout_seconds, start_timeout_seconds
        self._events: queue.Queue[tuple] = queue.Queue()
        self._waiting: deque[_Call] = deque()
        self._tickets = itertools.count()
        self._replicas: dict[int, _Replica] = {}
        self.quarantined: dict[int, str] = {}  # replicas out of use, with the reason
        self._end: ActorPoolError | None = None  # why no more calls are taken
        self._end_lock = threading.Lock()  # so that no call is put into the queue after it was emptied
        for number in range(size):
            self._launch(number)
        self._thread = threading.Thread(target=self._run, name=f"{name}-dispatcher", daemon=True)
        self._thread.start()

    def submit(self, method: str, *args: Any, times: int = 1) -> Future:
        """Call a method of some replica and return the future of its result. The call may take `times` timeouts."""
        call = _Call(method, args, Future(), times)
        with self._end_lock:
            if self._end is None:
                self._events.put(("submit", call))
                return call.future
        _fail(call, self._end)
        return call.future

    def handles(self) -> list[Any]:
        """Return the actors as they are now, for tests that kill them."""
        return [replica.handle for replica in list(self._replicas.values())]

    @property
    def num_up(self) -> int:
        """Replicas that take calls now."""
        return sum(replica.is_up for replica in list(self._replicas.values()))

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a replica."""
        return len(self._waiting)

    def close(self) -> None:
        """Kill the actors; calls that are not done raise ActorPoolError."""
        self._events.put(("close",))
        self._thread.join()

    def _run(self) -> None:
        try:
            self._dispatch_until_closed()
        except BaseException as error:  # callers would wait forever otherwise
            log.exception(f"{self.name}: the pool's dispatcher failed")
            end = ActorPoolError(f"{self.name}: the pool failed: {type(error).__name__}: {error}")
            end.__cause__ = error
        else:
            end = ActorPoolError(f"{self.name} was closed before the call was done")
        self._shut_down(end)

    def _dispatch_until_closed(self) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "submit": self._waiting.append,
            "started": self._finish_start,
            "done": self._finish,
        }
        next_look = 0.0
        while True:
            try:
                kind, *about = self._events.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                pass
            else:
                if kind == "close":
                    return
                handlers[kind](*about)
            if time.monotonic() >= next_look:
                self._end_overdue()
                next_look = time.monotonic() + LOOK_SECONDS
            if self._events.empty():  # once for many events, since it visits every replica
                self._dispatch()

    def _launch(self, number: int, failed_starts: int = 0) -> None:
        """Start an actor under this number, and probe it; without `validate` it takes calls once it is there."""
        handle = self._make_actor(number)
        deadline = time.monotonic() + self._start_timeout
        replica = self._replicas[number] = _Replica(number, handle, deadline, failed_starts)
        self._when_done((handle.probe if self._validate else handle.__ray_ready__).remote(), "started", replica)

    def _when_done(self, reference: ray.ObjectRef, event: str, *about: Any) -> None:
        reference.future().add_done_callback(lambda done: self._events.put((event, *about, done)))

    def _finish_start(self, replica: _Replica, done: Future) -> None:
        if self._replicas.get(replica.number) is not replica:
            return
        if (error := done.exception()) is not None:
            self._start_again(replica, error)
        elif self._validate and (problem := self._validate(replica.number, done.result())):
            self._quarantine(replica, f"its probe is not accepted: {problem}")
        else:
            replica.is_up, replica.failed_starts, replica.start_deadline = True, 0, float("inf")

    def _start_again(self, replica: _Replica, error: BaseException) -> None:
        """Replace a replica that did not start, a few times. Only the user can remove the cause of a UserError."""
        failed, reason = replica.failed_starts + 1, _in_brief(error)
        if failed >= MAX_FAILED_STARTS or reason.startswith(UserError.__name__):
            self._quarantine(replica, f"it failed to start {failed} times: {reason}")
            return
        log.warning(f"{self.name} {replica.number} did not start ({reason}); starting another")
        self.num_respawns += 1
        ray.kill(replica.handle)
        self._launch(replica.number, failed)

    def _quarantine(self, replica: _Replica, reason: str) -> None:
        log.warning(f"{self.name} {replica.number} is quarantined: {reason}")
        self.quarantined[replica.number] = reason
        del self._replicas[replica.number]
        ray.kill(replica.handle)

    def _dispatch(self) -> None:
        if not self._replicas:
            reasons = ", ".join(f"{number}: {reason}" for number, reason in sorted(self.quarantined.items()))
            error = ActorPoolError(f"{self.name}: all replicas are quarantined ({reasons})")
            while self._waiting:
                _fail(self._waiting.popleft(), error)
        while self._waiting:
            up = [replica for replica in self._replicas.values() if replica.is_up]
            replica = min(up, key=lambda r: (len(r.in_flight), r.number), default=None)
            if replica is None or len(replica.in_flight) >= self._max_in_flight:
                return
            self._start(replica, self._waiting.popleft())

    def _start(self, replica: _Replica, call: _Call) -> None:
        if call.attempts == 0 and not call.future.set_running_or_notify_cancel():
            return None  # the caller cancelled it
        ticket = next(self._tickets)
        now = time.monotonic()
        self.num_retries += call.attempts > 0
        call.attempts += 1
        # Calls queue in a replica, so the deadline covers the calls before this one too.
        call.deadline = now + self._timeout * (call.times + sum(other.times for other in replica.in_flight.values()))
        replica.in_flight[ticket] = call
        try:
            reference = getattr(replica.handle, call.method).remote(*call.args)
        except Exception as error:  # noqa: BLE001 - arguments that cannot be serialized fail this call only
            del replica.in_flight[ticket]
            return call.future.set_exception(error)
        return self._when_done(reference, "done", replica, ticket)

    def _finish(self, replica: _Replica, ticket: int, done: Future) -> None:
        call = replica.in_flight.get(ticket)
        if call is None:  # its replica was replaced, and the call was given to another
            return None
        error = done.exception()
        if error is None:
            call.future.set_result(done.result())
        elif isinstance(error, RayTaskError) and not is_device_fault(error.cause):
            # Messages for the user come without Ray's traceback.
            is_message = isinstance(error.cause, UserError | RunError)
            call.future.set_exception(error.cause if is_message else error.as_instanceof_cause())
        elif isinstance(error, RayError):
            return self._replace(replica, error.cause if isinstance(error, RayTaskError) else error)
        else:
            call.future.set_exception(error)
        del replica.in_flight[ticket]  # last: `_shut_down` fails the call if a line above raises
        return None

    def _replace(self, replica: _Replica, error: BaseException) -> None:
        """Replace a dead actor and put its calls back into the queue, in order."""
        log.warning(f"{self.name} {replica.number} died ({_in_brief(error)}); starting another")
        replica.is_up = False
        self.num_respawns += 1
        calls = [replica.in_flight[ticket] for ticket in sorted(replica.in_flight)]
        replica.in_flight.clear()  # late reports of the dead actor do not count
        for call in reversed(calls):
            if call.attempts >= self._max_attempts:
                call.future.set_exception(
                    ActorPoolError(f"{self.name}: {call.method} failed {call.attempts} times; last: {error}")
                )
            else:
                self._waiting.appendleft(call)
        ray.kill(replica.handle)
        self._launch(replica.number)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for replica in list(self._replicas.values()):
            if any(call.deadline <= now for call in replica.in_flight.values()):
                self._replace(replica, TimeoutError(f"no answer within {self._timeout:g} s"))
            elif replica.start_deadline <= now:
                self._quarantine(
                    replica, f"it was not up within {self._start_timeout:g} s; is there room for it in the cluster?"
                )

    def _shut_down(self, end: ActorPoolError) -> None:
        """Fail open and later calls, then kill the actors."""
        with self._end_lock:
            self._end = end
        replicas = list(self._replicas.values())
        calls = [*self._waiting, *(call for replica in replicas for call in replica.in_flight.values())]
        while not self._events.empty():
            event = self._events.get()
            calls += [event[1]] if event[0] == "submit" else []
        for replica in replicas:
            replica.is_up = False
        for call in calls:
            _fail(call, end)
        for replica in replicas:
            ray.kill(replica.handle)


def is_device_fault(error: BaseException) -> bool:
    """Return whether a GPU or its context is broken, so that no later call on it can be trusted."""
    text = str(error)
    if any(sign in text for sign in OUT_OF_MEMORY):
        return False
    is_named = isinstance(error, RuntimeError) and any(sign in text for sign in DEVICE_FAULTS)
    return isinstance(error, torch.AcceleratorError) or is_named


def _fail(call: _Call, error: BaseException) -> None:
    """Fail a call unless it is done, or was cancelled while it waited."""
    future = call.future
    if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
        future.set_exception(error)


def _in_brief(error: BaseException) -> str:
    """Return an error in one line: Ray puts a traceback before its line, CUDA general advice after it."""
    if isinstance(error, RayTaskError):
        return _in_brief(error.cause)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, RayError) else 0].strip()}"


def thread_env(threads: int) -> dict:
    """Return a runtime environment with `threads` threads; Ray would take num_cpus, which is a share."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **torch_environment()}}
