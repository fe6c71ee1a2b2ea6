"""Work that an LM is asked for once: read from a file, awaited where a call under way has the same, else computed.

The same pair scored in another company may differ in its last bits, so which company computes a pair must not depend on
timing: calls claim their keys in the order they are submitted, and a key that an earlier call claimed is awaited. What
a call has to compute is split into units, and whole units are stored, before anyone has their answers: after kill -9
the same units are left to do.

A thread of its own writes. It writes a training step's units in one transaction when the step's last one is there: they
touch the same pages of the file. It writes what comes without an end in sight, such as the pairs of a long file, every
few seconds.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from replug.cluster.background import attempt, outcome
from replug.models.score_cache import HitCounts, Key

Answer = TypeVar("Answer")
Known = TypeVar("Known")

SECONDS_BETWEEN_WRITES = 5.0  # what kill -9 may cost where no call ends

# What is computed together, as places in what is missing of a call, and what submits it to the LM.
Unit = tuple[list[int], "Callable[[], Future[list[Answer]]]"]


@dataclass(slots=True, eq=False)
class Claim(Generic[Answer]):
    """A key under way. A call that asks for its tokens meanwhile has them stored."""

    key: Key
    with_tokens: bool = False
    future: "Future[Answer]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # several may wait for it, so none of them can cancel it


@dataclass(frozen=True, slots=True)
class _Done(Generic[Answer]):
    """What the LM said to a unit: its answers, or why there are none. `is_last` of its call."""

    claims: list[Claim[Answer]]
    outcome: list[Answer] | BaseException
    is_last: bool


class AskedOnce(Generic[Answer]):
    """Asks only for what nobody has. `lock` is round all that happens to the file, and `counts`.

    `store` writes claims with their answers. It may raise, which every call that waits for them is told.
    """

    def __init__(
        self, store: Callable[[list[tuple[Claim[Answer], Answer]]], None], lock: threading.Lock, counts: HitCounts
    ) -> None:
        self._store, self._lock, self._counts = store, lock, counts
        self._claimed: dict[Key, Claim[Answer]] = {}
        self._queue: queue.Queue[_Done[Answer] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="score-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        keys: Sequence[Key],
        stored: Callable[[Sequence[Key]], dict[Key, Known]],
        units: Callable[[list[int]], list[Unit]],
        with_tokens: bool = False,
    ) -> "list[Known | Future[Answer]]":
        """Return each key's answer, or its future: from calls under way, from `stored`, and from the LM.

        `units` gets the rows that are missing, and is called once at most. Errors, also of `units`, are the futures'.
        """
        missing: list[int] = []
        answers: list[Known | Future[Answer]] = []
        with self._lock:
            # What is claimed is not looked up: which of two answers it gets would depend on timing.
            known = stored([key for key in dict.fromkeys(keys) if key not in self._claimed])
            for row, key in enumerate(keys):
                if key in known:
                    answers.append(known[key])
                    continue
                if key not in self._claimed:
                    self._claimed[key] = Claim(key)
                    missing.append(row)
                self._claimed[key].with_tokens |= with_tokens
                answers.append(self._claimed[key].future)
            self._counts.add(hits=len(keys) - len(missing), misses=len(missing))
            claims = [self._claimed[keys[row]] for row in missing]
        if missing:
            self._ask(claims, attempt(_checked_units, units, missing))
        return answers

    def close(self) -> None:
        """Write what waits, and end. The LM is closed before."""
        self._queue.put(None)
        self._thread.join()

    def _ask(self, claims: list[Claim[Answer]], units: list[Unit] | Exception) -> None:
        """Submit unit by unit. An error that the LM raises at once gives the claims back too."""
        if isinstance(units, Exception):
            return self._queue.put(_Done(claims, units, is_last=True))
        left, lock = len(units), threading.Lock()

        def settle(places: list[int], said: list[Answer] | BaseException) -> None:
            nonlocal left
            if not isinstance(said, BaseException) and len(said) != len(places):
                said = ValueError(f"the LM gave {len(said)} answers to {len(places)} inputs")
            with lock:
                left -= 1
                self._queue.put(_Done([claims[place] for place in places], said, is_last=left == 0))

        for places, submit in units:
            inner = attempt(submit)
            if isinstance(inner, Exception):
                settle(places, inner)
            else:
                inner.add_done_callback(lambda done, places=places: settle(places, outcome(done)))
        return None

    def _write(self) -> None:
        """Store units, then hand them out; an error goes to all who wait."""
        while units := self._next():
            new = [
                pair
                for unit in units
                if not isinstance(unit.outcome, BaseException)
                for pair in zip(unit.claims, unit.outcome, strict=True)
            ]
            with self._lock:  # to the end: a claim whose tokens somebody wants meanwhile would be stored without them
                error = attempt(self._store, new) if new else None
                for unit in units:
                    for claim in unit.claims:
                        del self._claimed[claim.key]
            for unit in units:
                said = unit.outcome if isinstance(unit.outcome, BaseException) else error or unit.outcome
                for row, claim in enumerate(unit.claims):
                    if isinstance(said, BaseException):
                        claim.future.set_exception(said)
                    else:
                        claim.future.set_result(said[row])

    def _next(self) -> list[_Done[Answer]]:
        """Wait for the units of the next transaction; none when it is closed and all is written."""
        units: list[_Done[Answer]] = []
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
            units.append(item)
            deadline = min(deadline, time.monotonic() + SECONDS_BETWEEN_WRITES)
            if item.is_last and self._queue.empty():
                return units


def _checked_units(units: Callable[[list[int]], list[Unit]], rows: list[int]) -> list[Unit]:
    found = units(rows)
    if sorted(place for own, _ in found for place in own) != list(range(len(rows))):
        raise ValueError(f"the LM's units are not each of {len(rows)} rows once: {[own for own, _ in found]}")
    return found
