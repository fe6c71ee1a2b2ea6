"""A disk cache of scores and answers round any LM: what it said once is never asked again.

Scores do not depend on the retriever, so runs of several retrievers read most of them from here. An answer is read from
the file, awaited where a call under way has asked for the same, or computed.

The same pair scored in another company may differ in its last bits, so which company computes a pair must not depend on
timing: calls claim their keys in the order they are submitted, and a key that an earlier call claimed is awaited. What
a call has to compute is split into units, and whole units are stored, before anyone has their answers: after kill -9
the same units are left to do.

A thread of its own writes. It writes a training step's units in one transaction when the step's last one is there: they
touch the same pages of the file. It writes what comes without an end in sight, such as the pairs of a long file, every
few seconds.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from replug.cluster.background import attempt, outcome
from replug.models.answer_table import AnswerTable, GenerationCache, SampleCache, generation_key, sampling_key
from replug.models.black_box_lm import AsyncLM, ContinuationScore, ScoreSum, WaitsForSubmitted, require_texts
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop
from replug.models.score_cache import Key, NewScore, ScoreCache, pair_key

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
    """Asks only for what nobody has, and counts hits and misses. `lock` is round all that happens to the file.

    `store` writes claims with their answers. It may raise, which every call that waits for them is told.
    """

    def __init__(self, store: Callable[[list[tuple[Claim[Answer], Answer]]], None], lock: threading.Lock) -> None:
        self._store, self._lock = store, lock
        self.hits = self.misses = 0
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
            self.hits, self.misses = self.hits + len(keys) - len(missing), self.misses + len(missing)
            claims = [self._claimed[keys[row]] for row in missing]
        if missing:
            self._ask(claims, attempt(units, missing))
        return answers

    def close(self) -> None:
        """Write what waits, and end. The LM is closed before."""
        self._queue.put(None)
        self._thread.join()

    def _ask(self, claims: list[Claim[Answer]], units: list[Unit] | Exception) -> None:
        """Submit unit by unit. An error that the LM raises at once gives the claims back too."""
        if not isinstance(units, Exception) and sorted(p for own, _ in units for p in own) != [*range(len(claims))]:
            units = ValueError(f"the LM's units are not each of {len(claims)} rows once: {[own for own, _ in units]}")
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


log = logging.getLogger(__name__)

Score = TypeVar("Score", ContinuationScore, ScoreSum)
Part = TypeVar("Part")
Whole = TypeVar("Whole")


class CachingLM(WaitsForSubmitted):
    """An `AsyncLM` that asks `lm` only for what the SQLite file at `path` does not hold. Closing it closes `lm`.

    `uncached` is `lm`, for who measures how long it takes.
    """

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self.uncached = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._lock = threading.Lock()  # round the claims, the counts and the file
        self._file = ScoreCache(path)
        self._generated, self._sampled = GenerationCache(self._file), SampleCache(self._file)
        self._scores: AskedOnce[ContinuationScore] = AskedOnce(self._store_scores, self._lock)
        self._generations: AskedOnce[Generated] = AskedOnce(partial(self._store_answers, self._generated), self._lock)
        self._samples: AskedOnce[list[Sampled]] = AskedOnce(partial(self._store_answers, self._sampled), self._lock)

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return self.uncached.units(prefixes, continuations)

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "Future[list[ContinuationScore]]":
        """Answer from the cache, from calls under way, and from the LM, in this order.

        What is missing of a call with an `opening` is one unit: its rows share more than what all calls begin with.
        """
        return self._submit(prefixes, continuations, opening, self._file.scores, lambda score: score, with_tokens=True)

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ScoreSum]]":
        """As `submit`, for who needs the sums only: what is computed for it is stored without its tokens."""
        shape = ContinuationScore.summed
        return self._submit(prefixes, continuations, None, self._file.sums, shape, with_tokens=False)

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
        """Answer greedily, each prompt in a call of its own."""
        require_texts(prompts, "prompts")
        options = GenerationOptions(max_new_tokens, stop or None)
        answers = [self.submit_ensemble([prompt], [1.0], options) for prompt in prompts]
        return [answer.result().text for answer in answers]

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """Answer from the cache, from calls under way, and from the LM. Errors are the future's, those at once too."""
        key = generation_key(self.identity, prompts, weights, options)

        def units(rows: list[int]) -> list[Unit]:
            asked = partial(self.uncached.submit_ensemble, prompts, weights, options)
            return [([0], lambda: _mapped(asked(), lambda answer: [answer]))]

        answers: list[Generated | Future[Generated]]
        answers = self._generations.submit([key], self._generated.answers, units)
        return _mapped(gather(answers, _unchanged), lambda whole: whole[0])

    def submit_samples(self, prompts: Sequence[str], options: SamplingOptions) -> "Future[list[list[Sampled]]]":
        """As `submit_ensemble`; prompts that nobody has asked about are one call of the LM's."""
        require_texts(prompts, "prompts")
        keys = [sampling_key(self.identity, prompt, options) for prompt in prompts]

        def units(rows: list[int]) -> list[Unit]:
            asked = [prompts[row] for row in rows]
            return [(list(range(len(rows))), partial(self.uncached.submit_samples, asked, options))]

        answers: list[list[Sampled] | Future[list[Sampled]]]
        answers = self._samples.submit(keys, self._sampled.answers, units)
        return gather(answers, _unchanged)

    @property
    def num_hits(self) -> int:
        """Pairs and answers asked for since the start that did not have to be computed."""
        return sum(asked.hits for asked in self._asked())

    @property
    def num_misses(self) -> int:
        return sum(asked.misses for asked in self._asked())

    def metrics(self) -> dict[str, float]:
        """The LM's own, and hits, misses and the share of hits since the start."""
        hits, misses = self.num_hits, self.num_misses
        counted = {"hit_share": hits / max(1, hits + misses), "hits": float(hits), "misses": float(misses)}
        return self.uncached.metrics() | counted

    def close(self) -> None:
        self.uncached.close()  # first: its answers are stored until it is closed
        for asked in self._asked():
            asked.close()
        with self._lock:
            self._file.close()

    def _asked(self) -> tuple[AskedOnce, ...]:
        return self._scores, self._generations, self._samples

    def _submit(
        self,
        prefixes: Sequence[str],
        continuations: Sequence[str],
        opening: str | None,
        stored: Callable[[Sequence[Key]], dict[Key, Score]],
        shape: Callable[[ContinuationScore], Score],
        with_tokens: bool,
    ) -> "Future[list[Score]]":
        require_texts(prefixes, "prefixes")
        require_texts(continuations, "continuations")
        keys = [pair_key(self.identity, p, c) for p, c in zip(prefixes, continuations, strict=True)]

        def units(rows: list[int]) -> list[Unit]:
            before, after = [prefixes[row] for row in rows], [continuations[row] for row in rows]

            def ask(places: list[int], **options: Any) -> "Future[list[ContinuationScore]]":
                own = [before[place] for place in places], [after[place] for place in places]
                return self.uncached.submit(*own, **options)

            if opening is not None:
                places = list(range(len(rows)))
                return [(places, partial(ask, places, opening=opening))]
            return [(unit, partial(ask, unit)) for unit in self.uncached.units(before, after)]

        answers: list[Score | Future[ContinuationScore]] = self._scores.submit(keys, stored, units, with_tokens)
        return gather(answers, shape)

    def _store_scores(self, scores: list[tuple[Claim[ContinuationScore], ContinuationScore]]) -> None:
        new = [NewScore(claim.key, score, claim.with_tokens) for claim, score in scores]
        self._file.store(self.identity, new)

    def _store_answers(self, table: AnswerTable, answers: list[tuple[Claim, Any]]) -> None:
        table.store(self.identity, {claim.key: answer for claim, answer in answers})


def _unchanged(answer: Whole) -> Whole:
    return answer


def _mapped(future: "Future[Part]", change: Callable[[Part], Whole]) -> "Future[Whole]":
    """Return the future of what `change` makes of a result; errors and cancellation are errors."""
    whole: Future[Whole] = Future()
    whole.set_running_or_notify_cancel()  # others may wait for the same, so nobody cancels it

    def settle(done: "Future[Part]") -> None:
        found = outcome(done)
        if isinstance(found, BaseException):
            whole.set_exception(found)
        else:
            whole.set_result(change(found))

    future.add_done_callback(settle)
    return whole


def gather(answers: Sequence["Whole | Future[Part]"], shape: "Callable[[Part], Whole]") -> "Future[list[Whole]]":
    """One future for all, in order, those under way as `shape` makes them; the first error in order is its error."""
    whole: Future[list[Whole]] = Future()
    whole.set_running_or_notify_cancel()
    pending = [answer for answer in answers if isinstance(answer, Future)]
    left = len(pending)
    lock = threading.Lock()

    def finish_one(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result([shape(a.result()) if isinstance(a, Future) else a for a in answers])

    if not pending:
        whole.set_result([answer for answer in answers if not isinstance(answer, Future)])
    for future in pending:
        future.add_done_callback(finish_one)
    return whole
