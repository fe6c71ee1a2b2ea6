"""A disk cache of scores and answers round any LM: what it said once is never asked again.

Scores do not depend on the retriever, so a sweep over retrievers reads most of them from here.
The same pair scored in another company may differ in its last bits, so which company computes a pair must
not depend on timing: calls claim their pairs in the order they are submitted, and a pair that an earlier
call claimed is awaited and not computed again. What a call has to compute is split into the LM's own units, and
whole units are stored, before anyone has their scores: after kill -9 the same units are left to do. A call's units
are one transaction, as a rule, written by a thread of its own (`models/asked_once.py`). Answers are
`models/asked_once.py`'s.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from replug.cluster.futures import attempt, outcome
from replug.config.errors import RunError
from replug.models.answer_table import GenerationCache, SampleCache, generation_key, sampling_key
from replug.models.asked_once import AskedOnce, UnitWriter
from replug.models.black_box_lm import AsyncLM, ContinuationScore, ScoreSum, require_texts
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop
from replug.models.score_cache import HitCounts, Key, NewScore, ScoreCache, pair_key

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", ContinuationScore, ScoreSum)
Part = TypeVar("Part")
Whole = TypeVar("Whole")


@dataclass(slots=True)
class _Claim:
    """A pair under way. Whoever asks for its tokens meanwhile has them stored."""

    with_tokens: bool = False
    future: "Future[ContinuationScore]" = field(default_factory=Future)


class _Asking:
    """A call whose units are computed: how many are not there yet."""

    def __init__(self, num_units: int) -> None:
        self._left, self._lock = num_units, threading.Lock()

    def one_is_there(self) -> bool:
        """Whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0


@dataclass(frozen=True, slots=True)
class _Unit:
    """What the LM said of some pairs: their scores, or why there are none."""

    keys: list[Key]
    outcome: list[ContinuationScore] | BaseException


class CachingLM:
    """An `AsyncLM` that asks `lm` only for what the SQLite file at `path` does not hold. Closing it closes `lm`.

    `uncached` is `lm`, for who measures how long it takes.
    """

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self.uncached = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._lock = threading.Lock()  # round the claims, the counts and the file
        self._claimed: dict[Key, _Claim] = {}
        self._cache = ScoreCache(path)
        self._counts = HitCounts()
        self._writer = UnitWriter(self._settle)
        asked = self._lock, self._counts
        self._generations: AskedOnce[Generated] = AskedOnce(lm.identity, GenerationCache(self._cache), *asked)
        self._samples: AskedOnce[list[Sampled]] = AskedOnce(lm.identity, SampleCache(self._cache), *asked)

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return self.uncached.units(prefixes, continuations)

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "Future[list[ContinuationScore]]":
        """Answer from the cache, from calls under way, and from the LM, in this order.

        What is missing of a call with an `opening` is one unit: its rows share more than what all calls begin with.
        """
        return self._submit(prefixes, continuations, opening, self._cache.scores, lambda score: score, with_tokens=True)

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ScoreSum]]":
        """As `submit`, for who needs the sums only: what is computed for it is stored without its tokens."""
        shape = ContinuationScore.summed
        return self._submit(prefixes, continuations, None, self._cache.sums, shape, with_tokens=False)

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations, opening=opening).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
        """Greedy answers, each of a call of its own."""
        require_texts(prompts, "prompts")
        options = GenerationOptions(max_new_tokens, stop or None)
        answers = [self.submit_ensemble([prompt], [1.0], options) for prompt in prompts]
        return [answer.result().text for answer in answers]

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """Answer from the cache, from calls under way, and from the LM. Errors are the future's, those at once too."""
        key = generation_key(self.identity, prompts, weights, options)
        [answer] = self._generations.submit(
            [key], lambda _: _of_one(self.uncached.submit_ensemble(prompts, weights, options))
        )
        return answer

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self.submit_ensemble(prompts, weights, options).result()

    def submit_samples(self, prompts: Sequence[str], options: SamplingOptions) -> "Future[list[list[Sampled]]]":
        """As `submit_ensemble`; prompts that nobody has asked about are one call of the LM's."""
        require_texts(prompts, "prompts")
        keys = [sampling_key(self.identity, prompt, options) for prompt in prompts]
        samples = self._samples.submit(
            keys, lambda rows: self.uncached.submit_samples([prompts[row] for row in rows], options)
        )
        return gather(samples, _as_it_is)

    def sample(self, prompts: Sequence[str], options: SamplingOptions) -> list[list[Sampled]]:
        return self.submit_samples(prompts, options).result()

    @property
    def num_hits(self) -> int:
        """Pairs and answers asked for since the start that did not have to be computed."""
        return self._counts.hits

    @property
    def num_misses(self) -> int:
        return self._counts.misses

    @property
    def hit_share(self) -> float:
        """Share of hits in what was asked for since the start."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)

    def metrics(self) -> dict[str, float]:
        """The LM's own, and hits and misses since the start."""
        hits = {"hit_share": self.hit_share, "hits": float(self.num_hits), "misses": float(self.num_misses)}
        return self.uncached.metrics() | hits

    def close(self) -> None:
        self.uncached.close()  # first: its answers are stored until it is closed
        self._writer.close()
        self._generations.close()
        self._samples.close()
        with self._lock:
            try:
                self._store([])
            except RunError as error:  # counts are not worth a run that is done
                log.warning(f"hits and misses are not counted: {error}")
            self._cache.close()

    def _submit(
        self,
        prefixes: Sequence[str],
        continuations: Sequence[str],
        opening: str | None,
        stored: Callable[[Sequence[Key]], dict[Key, Answer]],
        shape: Callable[[ContinuationScore], Answer],
        with_tokens: bool,
    ) -> "Future[list[Answer]]":
        require_texts(prefixes, "prefixes")
        require_texts(continuations, "continuations")
        keys = [pair_key(self.identity, p, c) for p, c in zip(prefixes, continuations, strict=True)]
        with self._lock:
            # What is claimed is not looked up: which of two answers it gets would depend on timing.
            known = stored([key for key in dict.fromkeys(keys) if key not in self._claimed])
            answers, missing = self._claim(keys, known, with_tokens)
        if missing:
            rows = list(missing.values())
            self._ask(list(missing), [prefixes[row] for row in rows], [continuations[row] for row in rows], opening)
        return gather(answers, shape)

    def _claim(
        self, keys: list[Key], known: dict[Key, Answer], with_tokens: bool
    ) -> tuple[list["Answer | Future[ContinuationScore]"], dict[Key, int]]:
        """An answer or its future for each key, and the rows of those that nobody has or is computing."""
        missing: dict[Key, int] = {}
        answers: list[Answer | Future[ContinuationScore]] = []
        for row, key in enumerate(keys):
            if key in known:
                answers.append(known[key])
                continue
            if key not in self._claimed:
                self._claimed[key] = _Claim()
                missing[key] = row
            self._claimed[key].with_tokens |= with_tokens
            answers.append(self._claimed[key].future)
        self._counts.add(hits=len(keys) - len(missing), misses=len(missing))
        return answers, missing

    def _ask(self, keys: list[Key], prefixes: list[str], continuations: list[str], opening: str | None) -> None:
        """Submit what is missing, unit by unit. An error that the LM raises at once gives the claims back too."""
        if opening is not None:
            return self._ask_unit(_Asking(1), keys, prefixes, continuations, opening)
        units = attempt(self.uncached.units, prefixes, continuations)
        if isinstance(units, Exception):
            return self._writer.put(_Unit(keys, units), is_last=True)
        if sorted(row for unit in units for row in unit) != list(range(len(keys))):
            error = ValueError(f"the LM's units are not each of {len(keys)} rows once: {units}")
            return self._writer.put(_Unit(keys, error), is_last=True)
        call = _Asking(len(units))
        for unit in units:
            own_prefixes, own_continuations = [prefixes[row] for row in unit], [continuations[row] for row in unit]
            self._ask_unit(call, [keys[row] for row in unit], own_prefixes, own_continuations, None)
        return None

    def _ask_unit(
        self,
        call: _Asking,
        keys: list[Key],
        prefixes: list[str],
        continuations: list[str],
        opening: str | None,
    ) -> None:
        def settle(outcome: list[ContinuationScore] | BaseException) -> None:
            self._writer.put(_Unit(keys, outcome), call.one_is_there())

        submit = self.uncached.submit if opening is None else partial(self.uncached.submit, opening=opening)
        inner = attempt(submit, prefixes, continuations)
        if isinstance(inner, Exception):
            settle(inner)
        else:
            inner.add_done_callback(lambda done: settle(outcome(done)))

    def _settle(self, units: list[_Unit]) -> None:
        """Store units, then hand them out; an error goes to all who wait. Runs in the writer's thread."""
        units = [_checked(unit) for unit in units]
        with self._lock:  # to the end: a claim whose tokens somebody wants meanwhile would be stored without them
            claims = [[self._claimed[key] for key in unit.keys] for unit in units]
            error = attempt(self._store_units, units, claims)
            for unit in units:
                for key in unit.keys:
                    del self._claimed[key]
        for unit, waiting in zip(units, claims, strict=True):
            _hand_out(waiting, unit.outcome if isinstance(unit.outcome, BaseException) else error or unit.outcome)

    def _store_units(self, units: list[_Unit], claims: list[list[_Claim]]) -> None:
        new = [
            NewScore(key, score, claim.with_tokens)
            for unit, waiting in zip(units, claims, strict=True)
            if not isinstance(unit.outcome, BaseException)
            for key, score, claim in zip(unit.keys, unit.outcome, waiting, strict=True)
        ]
        if new:
            self._store(new)

    def _store(self, scores: list[NewScore]) -> None:
        """Write scores, and the hits and misses that the file has not been told of."""
        self._cache.store(self.identity, scores, *self._counts.untold)
        self._counts.are_told()


def _checked(unit: _Unit) -> _Unit:
    """An answer of another length is an error."""
    if isinstance(unit.outcome, BaseException) or len(unit.outcome) == len(unit.keys):
        return unit
    return _Unit(unit.keys, ValueError(f"the LM gave {len(unit.outcome)} scores for {len(unit.keys)} inputs"))


def _hand_out(claims: list[_Claim], outcome: list[ContinuationScore] | BaseException) -> None:
    for row, claim in enumerate(claims):
        if isinstance(outcome, BaseException):
            claim.future.set_exception(outcome)
        else:
            claim.future.set_result(outcome[row])


def _of_one(future: "Future[Whole]") -> "Future[list[Whole]]":
    """A call with one answer, which may be cancelled."""
    whole: Future[list[Whole]] = Future()

    def settle(done: "Future[Whole]") -> None:
        found = outcome(done)
        if isinstance(found, BaseException):
            whole.set_exception(found)
        else:
            whole.set_result([found])

    future.add_done_callback(settle)
    return whole


def _as_it_is(answer: Whole) -> Whole:
    return answer


def gather(answers: Sequence["Whole | Future[Part]"], shape: "Callable[[Part], Whole]") -> "Future[list[Whole]]":
    """One future for all, in order, those under way as `shape` makes them; the first error in order is its error."""
    whole: Future[list[Whole]] = Future()
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
