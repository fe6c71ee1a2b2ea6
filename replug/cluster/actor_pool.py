"""A pool of Ray actors that loses no work: least loaded first, bounded in flight, calls repeated when an actor dies.

Calls must be idempotent: an actor may die after it has done a call. Errors that the actor itself raises are not
retried. A fault of its GPU counts as the actor's death, since no later result can be trusted.

A replica starts in two stages. Its constructor is quick, and waits for room in the cluster without a limit: replicas
join when a node joins. Slow work, such as loading a model, belongs in `probe`, which has a deadline. A replica that
cannot start, or fails its probe, is quarantined; calls fail when none is left.
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
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from replug.cluster.environment import torch_environment
from replug.config.errors import RunError, UserError

log = logging.getLogger(__name__)


# Times in a row that a replica may fail to start: a GPU's memory may still be held by the one before it.
MAX_FAILED_STARTS = 3
# Times in a row that it may be killed while it starts: nodes leave, but a node without the memory kills each one.
MAX_KILLED_STARTS = 20
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
    submitted: float = field(default_factory=time.monotonic)
    attempts: int = 0
    deadline: float = float("inf")


@dataclass
class _Replica:
    number: int
    handle: Any
    failed_starts: int = 0
    killed_starts: int = 0
    is_up: bool = False
    start_deadline: float = float("inf")  # from its placement until it is up
    in_flight: dict[int, _Call] = field(default_factory=dict)


class ActorPool:
    """Up to `size` replicas made by `make_actor(number)`; `submit` returns a future at once.

    `validate(number, result)` takes the result of a new replica's `probe` method and returns a problem, or None.
    A placed replica has `start_timeout_seconds` for its probe, and the cluster the same time to place a first replica.
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
        # Since the start; a call waits from `submit` until a replica gets it.
        self.num_calls = self.num_retries = self.num_respawns = 0
        self.waited_seconds = 0.0
        self._make_actor, self._validate = make_actor, validate
        self._max_in_flight, self._max_attempts = max_in_flight, max_attempts
        self._timeout, self._start_timeout = timeout_seconds, start_timeout_seconds
        self._events: queue.Queue[tuple] = queue.Queue()
        self._waiting: deque[_Call] = deque()
        self._tickets = itertools.count()
        self._replicas: dict[int, _Replica] = {}
        self.quarantined: dict[int, str] = {}  # replicas out of use, with the reason
        self._last_launch = time.monotonic()
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
            "placed": self._probe,
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

    def _launch(self, number: int, failed_starts: int = 0, killed_starts: int = 0) -> None:
        """Start an actor under this number; it waits for its place in the cluster."""
        handle = self._make_actor(number)
        replica = self._replicas[number] = _Replica(number, handle, failed_starts, killed_starts)
        self._last_launch = time.monotonic()
        self._when_done(handle.__ray_ready__.remote(), "placed", replica)

    def _probe(self, replica: _Replica, done: Future) -> None:
        """Probe a placed replica; without `validate` it takes calls at once."""
        if self._replicas.get(replica.number) is not replica:
            return None
        if self._validate is None or done.exception() is not None:
            return self._finish_start(replica, done)
        replica.start_deadline = time.monotonic() + self._start_timeout
        return self._when_done(replica.handle.probe.remote(), "started", replica)

    def _when_done(self, reference: ray.ObjectRef, event: str, *about: Any) -> None:
        reference.future().add_done_callback(lambda done: self._events.put((event, *about, done)))

    def _finish_start(self, replica: _Replica, done: Future) -> None:
        if self._replicas.get(replica.number) is not replica:
            return
        replica.start_deadline = float("inf")
        error = done.exception()
        if error is not None:
            self._start_again(replica, error)
        elif self._validate and (problem := self._validate(replica.number, done.result())):
            self._quarantine(replica, f"its probe is not accepted: {problem}")
        else:
            replica.is_up, replica.failed_starts, replica.killed_starts = True, 0, 0

    def _start_again(self, replica: _Replica, error: BaseException) -> None:
        """Replace a replica that did not start: many times if it was killed, a few if its own code fails or hangs.

        A UserError is not retried: only the user can remove its cause.
        """
        is_its_own = isinstance(error, RayTaskError | TimeoutError) or (
            isinstance(error, ActorDiedError) and error.actor_init_failed
        )
        if is_its_own and UserError.__name__ in (reason := _telling_line(error)):
            self._quarantine(replica, f"it cannot start: {reason}")
            return
        failed, killed = replica.failed_starts + is_its_own, replica.killed_starts + (not is_its_own)
        if failed >= MAX_FAILED_STARTS or killed >= MAX_KILLED_STARTS:
            times = failed if is_its_own else killed
            self._quarantine(replica, f"it failed to start {times} times: {_telling_line(error)}")
            return
        log.warning(f"{self.name} {replica.number} did not start ({_in_brief(error)}); starting another")
        self.num_respawns += 1
        ray.kill(replica.handle)
        self._launch(replica.number, failed, killed)

    def _quarantine(self, replica: _Replica, reason: str) -> None:
        log.warning(f"{self.name} {replica.number} is quarantined: {reason}")
        self.quarantined[replica.number] = reason
        del self._replicas[replica.number]
        ray.kill(replica.handle)

    def _dispatch(self) -> None:
        if not self._replicas:
            self._fail_waiting(f"all replicas are quarantined{self._reasons()}")
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
        if call.attempts == 0:
            self.num_calls += 1
            self.waited_seconds += now - call.submitted
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

    def _room_deadline(self) -> float:
        """Return when calls fail while all replicas wait for room, counted from the first call or the last launch.

        A placed replica ends the wait by itself: it comes up, or is quarantined.
        """
        replicas = self._replicas.values()
        have_room = any(replica.is_up or replica.start_deadline < float("inf") for replica in replicas)
        if have_room or not (self._waiting and replicas):
            return float("inf")
        return max(self._last_launch, self._waiting[0].submitted) + self._start_timeout

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for replica in list(self._replicas.values()):
            if any(call.deadline <= now for call in replica.in_flight.values()):
                self._replace(replica, TimeoutError(f"no answer within {self._timeout:g} s"))
            elif replica.start_deadline <= now:
                self._start_again(replica, TimeoutError(f"it was not up {self._start_timeout:g} s after it had room"))
        if self._room_deadline() <= now:
            self._fail_waiting(
                f"no replica came up within {self._start_timeout:g} s; is there room for one in the cluster?"
                f"{self._reasons()}"
            )

    def _reasons(self) -> str:
        """Return the reasons of the quarantined replicas in brackets, or an empty string."""
        reasons = ", ".join(f"{number}: {reason}" for number, reason in sorted(self.quarantined.items()))
        return f" ({reasons})" if reasons else ""

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            _fail(self._waiting.popleft(), ActorPoolError(f"{self.name}: {reason}"))

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
    """Return an error in brief: messages of Ray's own errors are long and add nothing to their names."""
    if isinstance(error, RayTaskError):
        return _in_brief(error.cause)
    return type(error).__name__ if isinstance(error, RayError) else f"{type(error).__name__}: {_telling_line(error)}"


def _telling_line(error: BaseException) -> str:
    """Return an error's line for the user: Ray puts a traceback before it, CUDA general advice after it."""
    if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
        return _in_brief(error.cause)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, RayError) else 0].strip()


def thread_env(threads: int) -> dict:
    """Return a runtime environment with `threads` threads; Ray would take num_cpus, which is a share."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **torch_environment()}}
