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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from replug.cluster.background import attempt, outcome
from replug.models.black_box_lm import AsyncLM, Call, ScoreCall, mapped, require_texts, sum_of, sums_of
from replug.models.score_cache import Key, ScoreCache, Stored, call_keys

SECONDS_BETWEEN_WRITES = 5.0  # what kill -9 may cost where no call ends

Whole = TypeVar("Whole")


@dataclass(slots=True, eq=False)
class Asked:
    """One call's questions to the LM: its keys, and what is said of each or why there is nothing.

    It has one future, which is done after the last: a future for each of a step's thousand keys costs more than all
    else here.
    """

    keys: list[Key]
    sums_only: bool
    num_coming: int  # keys of which the LM has said nothing yet
    results: "dict[Key, Stored | BaseException]" = field(default_factory=dict)
    done: "Future[None]" = field(default_factory=Future)


# What the LM said to some rows of a call, or why it said nothing.
Said = tuple[Asked, list[int], list[Stored] | BaseException]


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
        self._reserved: dict[Key, Asked] = {}
        self._queue: queue.Queue[Said | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="score-writer", daemon=True)
        self._thread.start()

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return self.uncached.units(prefixes, continuations)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Answer from the cache, from calls under way, and from the LM, in this order."""
        return self._look_up(call, self._file.read)

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[np.ndarray]":
        """Return a future of sums of log-probs (nats) and numbers of tokens, float64 [N, 2].

        What is computed for it is stored without its tokens, which a run of the paper's size could not keep.
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

        What is reserved is not looked up: which of two answers it gets would depend on timing. Tokens are not taken
        from a call for sums, whose rows are stored without them.
        """
        keys = call_keys(self.identity, call)
        sums_only = isinstance(call, ScoreCall) and call.sums_only
        with self._lock:
            under_way = {key: asked for key in keys if (asked := self._reserved.get(key))}
            if not sums_only:
                under_way = {key: asked for key, asked in under_way.items() if not asked.sums_only}
            known = read([key for key in dict.fromkeys(keys) if key not in under_way])
            missing: dict[Key, int] = {}
            for row, key in enumerate(keys):
                if key not in known and key not in under_way:
                    missing.setdefault(key, row)
            own = Asked(list(missing), sums_only, len(missing))
            self._reserved |= dict.fromkeys(missing, own)
            under_way |= dict.fromkeys(missing, own)
            self.num_hits, self.num_misses = self.num_hits + len(keys) - len(missing), self.num_misses + len(missing)
        if missing:
            self._ask(own, call.take(list(missing.values())))

        def answers() -> list[Any]:
            said = [known[key] if key in known else under_way[key].results[key] for key in keys]
            for one in said:
                if isinstance(one, BaseException):
                    raise one
            return said

        return after([asked.done for asked in set(under_way.values())], answers)

    def _ask(self, asked: Asked, call: Call) -> None:
        """Submit the units of a call. An error that the LM raises at once gives the keys back too."""
        units = attempt(self._units, call)
        if not isinstance(units, Exception) and sorted(row for unit in units for row in unit) != [*range(len(call))]:
            units = ValueError(f"the LM's units do not hold each of {len(call)} rows once: {units}")
        if isinstance(units, Exception):
            return self._queue.put((asked, [*range(len(call))], units))

        def settle(rows: list[int], done: "Future[list[Any]]") -> None:
            said = outcome(done)
            if not isinstance(said, BaseException) and len(said) != len(rows):
                said = ValueError(f"the LM gave {len(said)} answers to {len(rows)} inputs")
            elif asked.sums_only and not isinstance(said, BaseException):
                said = list(map(sum_of, said))
            self._queue.put((asked, rows, said))

        for rows, inner in self.uncached.submit_units(call, units):
            inner.add_done_callback(partial(settle, rows))
        return None

    def _units(self, call: Call) -> list[list[int]]:
        """Return the rows of a call that are computed together.

        Rows with an opening share more than what all calls begin with, so they are one unit.
        """
        if isinstance(call, ScoreCall) and call.opening is None:
            return self.uncached.units(call.prefixes, call.continuations)
        return [list(range(len(call)))]

    def _write(self) -> None:
        """Store what the LM said, then hand it out; an error goes to all who wait."""
        while parts := self._next():
            new: dict[Key, Stored] = {}
            for asked, rows, said in sorted(parts, key=lambda part: not part[0].sums_only):  # tokens replace a sum
                if not isinstance(said, BaseException):
                    new |= zip((asked.keys[row] for row in rows), said, strict=True)
            with self._lock:
                error = attempt(self._file.store, self.identity, new) if new else None
                for asked, rows, _ in parts:
                    for key in (asked.keys[row] for row in rows):
                        if self._reserved.get(key) is asked:  # not a later call's, for tokens
                            del self._reserved[key]
            for asked, rows, said in parts:
                said = said if isinstance(said, BaseException) else error or said
                results = [said] * len(rows) if isinstance(said, BaseException) else said
                asked.results |= zip((asked.keys[row] for row in rows), results, strict=True)
                if len(asked.results) == len(asked.keys):
                    asked.done.set_result(None)

    def _next(self) -> list[Said]:
        """Wait for the parts of the next transaction; none when it is closed and all is written."""
        parts: list[Said] = []
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
            asked, rows, _ = item
            asked.num_coming -= len(rows)
            if not asked.num_coming and self._queue.empty():
                return parts


def after(pending: "Iterable[Future[None]]", result: Callable[[], Whole]) -> "Future[Whole]":
    """Return the future of a result that can be had once all of `pending` are done."""
    left, all_done = iter(pending), Future[None]()

    def wait_for_next(_: object = None) -> None:
        for future in left:  # a callback of what is done would be called here, in a stack as deep as there are futures
            if not future.done():
                return future.add_done_callback(wait_for_next)
        return all_done.set_result(None)

    wait_for_next()
    return mapped(all_done, lambda _: result())
