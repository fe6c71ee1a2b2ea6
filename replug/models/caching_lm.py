"""A disk cache of scores and answers round any LM: what it said once is never asked again.

A result is read from the file, awaited where a call under way has asked for the same, or computed. The last bits of a
score follow from the company in which it is computed, so that company must not depend on timing: calls reserve their
keys in the order they are submitted, and what a call has to compute is split into units. Whole units are stored before
anyone has their results, so after kill -9 the same units are left to do. A thread of its own writes a call's units in
one transaction when the last one is there, and in any case every few seconds.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replug.cluster.background import attempt, outcome
from replug.models.black_box_lm import AsyncLM, Call, ScoreCall, mapped, require_texts, sums_of
from replug.models.score_cache import Key, ScoreCache, Stored, call_keys

SECONDS_BETWEEN_WRITES = 5.0  # what kill -9 may cost where no call ends


@dataclass(slots=True, eq=False)
class Reserved:
    """A key under way. A call that asks for its tokens meanwhile has them stored."""

    key: Key
    sums_only: bool = True
    future: "Future[Stored]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # several may wait for it, so none of them can cancel it


# What the LM said to a unit: its keys, its results or why there are none, and whether it is the last of its call.
Done = tuple[list[Reserved], list[Stored] | BaseException, bool]


class CachingLM(AsyncLM):
    """An `AsyncLM` that asks `lm` only for what the SQLite file at `path` does not hold. Closing it closes `lm`.

    `uncached` is `lm`, for callers that measure how long it takes. `num_hits` and `num_misses` count the pairs and
    prompts that were asked for since the start, and were not computed or were.
    """

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self.uncached = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self.num_hits = self.num_misses = 0
        self._lock = threading.Lock()  # round the reserved keys, the counts and the file
        self._file = ScoreCache(path)
        self._reserved: dict[Key, Reserved] = {}
        self._queue: queue.Queue[Done | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="score-writer", daemon=True)
        self._thread.start()

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return self.uncached.units(prefixes, continuations)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Answer from the cache, from calls under way, and from the LM, in this order."""
        return gather(self._look_up(call, self._file.read))

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[np.ndarray]":
        """Return a future of sums of log-probs (nats) and numbers of tokens, float64 [N, 2].

        What is computed for it is stored without its tokens, which a run of the paper's size could not keep.
        """
        require_texts(prefixes, "prefixes")
        require_texts(continuations, "continuations")
        results = self._look_up(ScoreCall(prefixes, continuations, sums_only=True), self._file.sums)
        return mapped(gather(results), sums_of)

    def metrics(self) -> dict[str, float]:
        """Return the LM's own metrics, and hits, misses and the share of hits since the start."""
        hits, misses = self.num_hits, self.num_misses
        counted = {"hit_share": hits / max(1, hits + misses), "hits": float(hits), "misses": float(misses)}
        return self.uncached.metrics() | counted

    def close(self) -> None:
        self.uncached.close()  # first: its answers are stored until it is closed
        self._queue.put(None)
        self._thread.join()
        with self._lock:
            self._file.close()

    def _look_up(self, call: Call, read: Callable[[Sequence[Key]], dict[Key, Any]]) -> list[Any]:
        """Return what `read` finds of each row, or its future. Errors of the LM are the futures'."""
        keys = call_keys(self.identity, call)
        sums_only = isinstance(call, ScoreCall) and call.sums_only
        missing: list[int] = []
        results: list[Any] = []
        with self._lock:
            # What is reserved is not looked up: which of two answers it gets would depend on timing.
            known = read([key for key in dict.fromkeys(keys) if key not in self._reserved])
            for row, key in enumerate(keys):
                if key in known:
                    results.append(known[key])
                    continue
                if key not in self._reserved:
                    self._reserved[key] = Reserved(key)
                    missing.append(row)
                self._reserved[key].sums_only &= sums_only
                results.append(self._reserved[key].future)
            self.num_hits, self.num_misses = self.num_hits + len(keys) - len(missing), self.num_misses + len(missing)
            reserved = [self._reserved[keys[row]] for row in missing]
        if missing:
            self._ask(reserved, call.take(missing))
        return results

    def _ask(self, reserved: list[Reserved], call: Call) -> None:
        """Submit unit by unit. An error that the LM raises at once gives the keys back too."""
        units = attempt(self._units, call)
        if not isinstance(units, Exception) and sorted(row for unit in units for row in unit) != [*range(len(call))]:
            units = ValueError(f"the LM's units do not hold each of {len(call)} rows once: {units}")
        if isinstance(units, Exception):
            return self._queue.put((reserved, units, True))
        left, lock = len(units), threading.Lock()

        def settle(unit: list[int], said: list[Stored] | BaseException) -> None:
            nonlocal left
            if not isinstance(said, BaseException) and len(said) != len(unit):
                said = ValueError(f"the LM gave {len(said)} answers to {len(unit)} inputs")
            with lock:
                left -= 1
                self._queue.put(([reserved[row] for row in unit], said, left == 0))

        for unit in units:
            inner = attempt(self.uncached.submit_call, call.take(unit))
            if isinstance(inner, Exception):
                settle(unit, inner)
            else:
                inner.add_done_callback(lambda done, unit=unit: settle(unit, outcome(done)))
        return None

    def _units(self, call: Call) -> list[list[int]]:
        """Return the rows of a call that are computed together.

        Rows with an opening share more than what all calls begin with, so they are one unit.
        """
        if isinstance(call, ScoreCall) and call.opening is None:
            return self.uncached.units(call.prefixes, call.continuations)
        return [list(range(len(call)))]

    def _write(self) -> None:
        """Store units, then hand them out; an error goes to all who wait."""
        while units := self._next():
            new: dict[Key, Stored] = {}
            for reserved, said, _ in units:
                if not isinstance(said, BaseException):
                    new |= {key.key: result for key, result in zip(reserved, said, strict=True)}
            with self._lock:  # to the end: a key whose tokens somebody wants meanwhile would be stored without them
                sums_only = {key.key for reserved, _, _ in units for key in reserved if key.sums_only}
                error = attempt(partial(self._file.store, self.identity), new, sums_only) if new else None
                for reserved, _, _ in units:
                    for key in reserved:
                        del self._reserved[key.key]
            for reserved, said, _ in units:
                said = said if isinstance(said, BaseException) else error or said
                for row, key in enumerate(reserved):
                    if isinstance(said, BaseException):
                        key.future.set_exception(said)
                    else:
                        key.future.set_result(said[row])

    def _next(self) -> list[Done]:
        """Wait for the units of the next transaction; none when it is closed and all is written."""
        units: list[Done] = []
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
            if item[2] and self._queue.empty():
                return units


def gather(results: "Sequence[Any | Future[Any]]") -> "Future[list[Any]]":
    """Return one future for all, in order; the first error in order is its error."""
    whole: Future[list[Any]] = Future()
    whole.set_running_or_notify_cancel()
    pending = [result for result in results if isinstance(result, Future)]
    left = len(pending)
    lock = threading.Lock()

    def finish() -> None:
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result([result.result() if isinstance(result, Future) else result for result in results])

    def count(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        finish()

    if not pending:
        finish()
    for future in pending:
        future.add_done_callback(count)
    return whole
