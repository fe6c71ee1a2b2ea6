"""A disk cache of scores and answers round any LM: it computes nothing twice.

A result is read from the file, awaited if a call under way computes it, or computed. The last bits of a score follow
from the company in which it is computed, so that company must not depend on timing: calls reserve their keys in the
order they are submitted, and the missing rows of a call are split into units. Whole units are stored before anyone has
their results, so after kill -9 the same units are left to do. The writer thread stores a call's units in one
transaction when the last one is there, and in any case every few seconds.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replug.cluster.background import attempt, outcome
from replug.models.black_box_lm import AsyncLM, Call, ScoreCall, gathered, mapped, require_texts, sum_of, sums_of
from replug.models.score_cache import Key, ScoreCache, Stored, call_keys

SECONDS_BETWEEN_WRITES = 5.0  # what kill -9 may cost where no call ends


@dataclass(slots=True, eq=False)
class Reservation:
    """The keys that one call has the LM compute, and the result or the error of each.

    It has one future, which is done after the last key: a future for each of a step's thousand keys costs more than all
    else here.
    """

    keys: list[Key]
    sums_only: bool
    num_coming: int  # keys without a result
    results: "dict[Key, Stored | BaseException]" = field(default_factory=dict)
    done: "Future[None]" = field(default_factory=Future)


# The LM's results of some rows of a call, or its error.
Answer = tuple[Reservation, list[int], list[Stored] | BaseException]


class CachingLM(AsyncLM):
    """An `AsyncLM` that asks `lm` only for what the SQLite file at `path` does not hold. Closing it closes `lm`.

    `uncached` is `lm`, for callers that measure how long it takes. `num_hits` and `num_misses` count the pairs and
    prompts since the start that were not computed, and those that were.
    """

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self.uncached = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self.num_hits = self.num_misses = 0
        self._lock = threading.Lock()  # round the reserved keys, the counts and the file
        self._file = ScoreCache(path)
        self._reserved: dict[Key, Reservation] = {}
        self._queue: queue.Queue[Answer | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="score-writer", daemon=True)
        self._thread.start()

    def units(self, call: Call) -> list[list[int]]:
        return self.uncached.units(call)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Answer from the cache, from calls under way, and from the LM, in this order."""
        return self._look_up(call, self._file.read)

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[np.ndarray]":
        """Return a future of sums of log-probs (nats) and numbers of tokens, float64 [N, 2].

        Computed scores are stored without their tokens, which a run of the paper's size could not keep.
        """
        require_texts(prefixes, "prefixes")
        require_texts(continuations, "continuations")
        return mapped(self._look_up(ScoreCall(prefixes, continuations, sums_only=True), self._file.sums), sums_of)

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

    def _look_up(self, call: Call, read: Callable[[Sequence[Key]], Mapping[Key, Any]]) -> "Future[list[Any]]":
        """Return a future of what `read` finds of each row, or the LM says. Its error is that of the first such row.

        Reserved keys are not looked up: their result would depend on timing. Tokens are not taken from a call for
        sums, whose rows are stored without them.
        """
        keys = call_keys(self.identity, call)
        sums_only = isinstance(call, ScoreCall) and call.sums_only
        with self._lock:
            reserved = {key: own for key in keys if (own := self._reserved.get(key))}
            under_way = {key: own for key, own in reserved.items() if sums_only or not own.sums_only}
            known = read([key for key in dict.fromkeys(keys) if key not in under_way])
            missing: dict[Key, int] = {}
            for row, key in enumerate(keys):
                if key not in known and key not in under_way:
                    missing.setdefault(key, row)
            own = Reservation(list(missing), sums_only, len(missing))
            self._reserved |= dict.fromkeys(missing, own)
            under_way |= dict.fromkeys(missing, own)
            self.num_hits, self.num_misses = self.num_hits + len(keys) - len(missing), self.num_misses + len(missing)
        if missing:
            self._ask(own, call.take(list(missing.values())))

        def answers() -> list[Any]:
            results = [known[key] if key in known else under_way[key].results[key] for key in keys]
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return results

        return gathered([reservation.done for reservation in set(under_way.values())], answers)

    def _ask(self, reservation: Reservation, call: Call) -> None:
        """Submit the units of a call. Their results and errors go to the writer."""

        def settle(rows: list[int], done: "Future[list[Any]]") -> None:
            answer = outcome(done)
            if not isinstance(answer, BaseException) and len(answer) != len(rows):
                answer = ValueError(f"the LM gave {len(answer)} answers to {len(rows)} inputs")
            elif reservation.sums_only and not isinstance(answer, BaseException):
                answer = list(map(sum_of, answer))
            self._queue.put((reservation, rows, answer))

        for rows, inner in self.uncached.submit_units(call):
            inner.add_done_callback(partial(settle, rows))

    def _write(self) -> None:
        """Store results, then hand them out; an error goes to all callers that wait."""
        while parts := self._next():
            new: dict[Key, Stored] = {}
            for reservation, rows, answer in sorted(parts, key=lambda part: not part[0].sums_only):
                # Tokens come last, since they replace a sum.
                if not isinstance(answer, BaseException):
                    new |= zip((reservation.keys[row] for row in rows), answer, strict=True)
            with self._lock:
                error = attempt(self._file.store, self.identity, new) if new else None
                for reservation, rows, _ in parts:
                    for key in (reservation.keys[row] for row in rows):
                        if self._reserved.get(key) is reservation:  # not a later call's, for tokens
                            del self._reserved[key]
            for reservation, rows, answer in parts:
                answer = answer if isinstance(answer, BaseException) else error or answer
                results = [answer] * len(rows) if isinstance(answer, BaseException) else answer
                reservation.results |= zip((reservation.keys[row] for row in rows), results, strict=True)
                if len(reservation.results) == len(reservation.keys):
                    reservation.done.set_result(None)

    def _next(self) -> list[Answer]:
        """Wait for the parts of the next transaction; none when it is closed and all is written."""
        parts: list[Answer] = []
        deadline = float("inf")
        while True:
            try:
                timeout = None if not parts else max(0.0, deadline - time.monotonic())
                item = self._queue.get(timeout=timeout)
            except queue.Empty:
                return parts
            if item is None:
                if parts:
                    self._queue.put(None)  # for the next time
                return parts
            parts.append(item)
            deadline = min(deadline, time.monotonic() + SECONDS_BETWEEN_WRITES)
            reservation, rows, _ = item
            reservation.num_coming -= len(rows)
            if not reservation.num_coming and self._queue.empty():
                return parts
