"""Answers asked of an LM once: read from the file of scores, awaited where a call under way has the same, else asked.

The rules are those of scores (`models/caching_lm.py`). Calls claim their answers in the order in which they are
submitted. What a call has to ask for is one call of the LM's, stored by a thread of its own before anyone has an
answer: after kill -9 nothing that somebody has seen is asked again, and the same is left to ask, in the same company.

That thread writes a training step's units together when the step's last one is there: they touch the same pages of the
file. It writes what comes without an end in sight, such as the pairs of a long file, every few seconds.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from replug.cluster.futures import attempt, outcome
from replug.models.score_cache import HitCounts, Key

Answer = TypeVar("Answer")


class Answers(Protocol[Answer]):
    """Where answers are kept."""

    def answers(self, keys: Sequence[Key]) -> dict[Key, Answer]:
        """Answers of those keys that are stored."""
        ...

    def store(self, identity: str, answers: Mapping[Key, Answer], hits: int = 0, misses: int = 0) -> None:
        """Add answers of a model, and to its counts of what it was asked."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Answer]):
    """What the LM said to a call: its answers, or why there are none."""

    keys: list[Key]
    outcome: list[Answer] | BaseException


class AskedOnce(Generic[Answer]):
    """Asks only for what `stored` does not hold. `lock` is round all that happens to the file, and `counts`."""

    def __init__(self, identity: str, stored: Answers[Answer], lock: threading.Lock, counts: HitCounts) -> None:
        self._identity, self._file, self._lock, self._counts = identity, stored, lock, counts
        self._claimed: dict[Key, Future[Answer]] = {}
        self._writer: UnitWriter[_Asked[Answer]] = UnitWriter(self._settle)

    def submit(self, keys: Sequence[Key], ask: "Callable[[list[int]], Future[list[Answer]]]") -> "list[Future[Answer]]":
        """The answer of each key: from calls under way, from the file, and from `ask`, which gets the rows to ask for.

        `ask` is called once at most; an error that it raises at once gives the claims back too.
        """
        with self._lock:
            known = self._file.answers([key for key in dict.fromkeys(keys) if key not in self._claimed])
            missing: dict[Key, int] = {}
            for row, key in enumerate(keys):
                if key not in known and key not in self._claimed:
                    self._claimed[key], missing[key] = _running(), row
            self._counts.add(hits=len(keys) - len(missing), misses=len(missing))
            answers = [_done(known[key]) if key in known else self._claimed[key] for key in keys]
        if missing:
            self._ask(missing, ask)
        return answers

    def close(self) -> None:
        """Write what waits. The LM is closed before."""
        self._writer.close()

    def _ask(self, missing: dict[Key, int], ask: "Callable[[list[int]], Future[list[Answer]]]") -> None:
        keys = list(missing)
        inner = attempt(ask, list(missing.values()))
        if isinstance(inner, Exception):
            self._writer.put(_Asked(keys, inner), is_last=True)
        else:
            inner.add_done_callback(lambda done: self._writer.put(_checked(_Asked(keys, outcome(done))), is_last=True))

    def _settle(self, asked: "list[_Asked[Answer]]") -> None:
        """Store answers, then hand them out. Runs in the writer's thread."""
        new = {
            key: answer
            for one in asked
            if not isinstance(one.outcome, BaseException)
            for key, answer in zip(one.keys, one.outcome, strict=True)
        }
        with self._lock:
            error = attempt(self._store, new) if new else None
            waiting = [[self._claimed.pop(key) for key in one.keys] for one in asked]
        for one, futures in zip(asked, waiting, strict=True):
            _hand_out(futures, error if error is not None and not _is_error(one) else one.outcome)

    def _store(self, answers: dict[Key, Answer]) -> None:
        self._file.store(self._identity, answers, *self._counts.untold)
        self._counts.are_told()


def _is_error(asked: _Asked) -> bool:
    return isinstance(asked.outcome, BaseException)


def _checked(asked: "_Asked[Answer]") -> "_Asked[Answer]":
    """Another number of answers is an error."""
    if isinstance(asked.outcome, BaseException) or len(asked.outcome) == len(asked.keys):
        return asked
    return _Asked(asked.keys, ValueError(f"the LM gave {len(asked.outcome)} answers to {len(asked.keys)} prompts"))


def _hand_out(futures: "list[Future[Answer]]", outcome: "list[Answer] | BaseException") -> None:
    for row, future in enumerate(futures):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome[row])


def _done(answer: Answer) -> "Future[Answer]":
    done: Future[Answer] = Future()
    done.set_result(answer)
    return done


def _running() -> "Future":
    """Several may wait for it, so none of them can cancel it."""
    answer: Future = Future()
    answer.set_running_or_notify_cancel()
    return answer


Unit = TypeVar("Unit")

SECONDS_BETWEEN_WRITES = 5.0  # what kill -9 may cost where no call ends


class UnitWriter(Generic[Unit]):
    """`write(units)` is called in one thread, with units in the order they came. It must not raise.

    `put(unit, is_last)`: the last unit of a call is written at once, with all that wait.
    """

    def __init__(self, write: Callable[[list[Unit]], None]) -> None:
        self._write = write
        self._queue: queue.Queue[tuple[Unit, bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="score-writer", daemon=True)
        self._thread.start()

    def put(self, unit: Unit, is_last: bool) -> None:
        self._queue.put((unit, is_last))

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while units := self._next():
            self._write(units)

    def _next(self) -> list[Unit]:
        """The units of the next transaction; none when it is closed and all is written."""
        units: list[Unit] = []
        deadline = float("inf")
        while True:
            try:
                timeout = None if not units else max(0.0, deadline - time.monotonic())
                item = self._queue.get(timeout=timeout)
            except queue.Empty:
                return units
            if item is None:
                if units:
                    self._queue.put(None)  # for the next time
                return units
            units.append(item[0])
            deadline = min(deadline, time.monotonic() + SECONDS_BETWEEN_WRITES)
            if item[1] and self._queue.empty():
                return units
