"""A disk cache of scores round any LM: what was scored once is never scored again.

Scores do not depend on the retriever, so a sweep over retrievers reads most of them from here.
The same pair scored in another company may differ in its last bits, so which company computes a pair must
not depend on timing: calls claim their pairs in the order they are submitted, and a pair that an earlier
call claimed is awaited and not computed again. What a call has to compute is split into the LM's own units,
and each unit is stored at once, in one transaction: after kill -9 the same units are left to do.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from replug.configs.errors import RunError
from replug.models.black_box_lm import AsyncLM, ContinuationScore, ScoreSum
from replug.models.generation import Generated, GenerationOptions
from replug.models.score_cache import Key, NewScore, ScoreCache, pair_key

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", ContinuationScore, ScoreSum)


@dataclass(slots=True)
class _Claim:
    """A pair under way. Whoever asks for its tokens meanwhile has them stored."""

    with_tokens: bool = False
    future: "Future[ContinuationScore]" = field(default_factory=Future)


class CachingLM:
    """An `AsyncLM` that asks `lm` only for what the SQLite file at `path` does not hold. Closing it closes `lm`."""

    def __init__(self, lm: AsyncLM, path: Path) -> None:
        self._lm = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._lock = threading.Lock()  # round the claims, the counts and the file
        self._claimed: dict[Key, _Claim] = {}
        self._cache = ScoreCache(path)
        self.num_hits = self.num_misses = 0
        self._hits_stored = self._misses_stored = 0

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return self._lm.units(prefixes, continuations)

    def submit(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ContinuationScore]]":
        """Answer from the cache, from calls under way, and from the LM, in this order."""
        return self._submit(prefixes, continuations, self._cache.scores, lambda score: score, with_tokens=True)

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ScoreSum]]":
        """As `submit`, for who needs the sums only: what is computed for it is stored without its tokens."""
        return self._submit(prefixes, continuations, self._cache.sums, ContinuationScore.summed, with_tokens=False)

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        return self._lm.generate(prompts, max_new_tokens, stop)

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """Not cached."""
        return self._lm.submit_ensemble(prompts, weights, options)

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self._lm.generate_ensemble(prompts, weights, options)

    @property
    def hit_share(self) -> float:
        """Share of the pairs asked for since the start that did not have to be computed."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)

    def metrics(self) -> dict[str, float]:
        """The LM's own, and hits and misses since the start."""
        hits = {"hit_share": self.hit_share, "hits": float(self.num_hits), "misses": float(self.num_misses)}
        return self._lm.metrics() | hits

    def close(self) -> None:
        self._lm.close()  # first: its answers are stored until it is closed
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
        stored: Callable[[Sequence[Key]], dict[Key, Answer]],
        shape: Callable[[ContinuationScore], Answer],
        with_tokens: bool,
    ) -> "Future[list[Answer]]":
        keys = [pair_key(self.identity, p, c) for p, c in zip(prefixes, continuations, strict=True)]
        with self._lock:
            # What is claimed is not looked up: which of two answers it gets would depend on timing.
            known = stored([key for key in dict.fromkeys(keys) if key not in self._claimed])
            answers, missing = self._claim(keys, known, with_tokens)
        if missing:
            rows = list(missing.values())
            self._ask(list(missing), [prefixes[row] for row in rows], [continuations[row] for row in rows])
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
        self.num_misses += len(missing)
        self.num_hits += len(keys) - len(missing)
        return answers, missing

    def _ask(self, keys: list[Key], prefixes: list[str], continuations: list[str]) -> None:
        """Submit what is missing, unit by unit. An error that the LM raises at once gives the claims back too."""
        units = _attempt(self._lm.units, prefixes, continuations)
        if isinstance(units, Exception):
            return self._settle(keys, units)
        if sorted(row for unit in units for row in unit) != list(range(len(keys))):
            return self._settle(keys, ValueError(f"the LM's units are not each of {len(keys)} rows once: {units}"))
        for unit in units:
            self._ask_unit(*([texts[row] for row in unit] for texts in (keys, prefixes, continuations)))
        return None

    def _ask_unit(self, keys: list[Key], prefixes: list[str], continuations: list[str]) -> None:
        inner = _attempt(self._lm.submit, prefixes, continuations)
        if isinstance(inner, Exception):
            self._settle(keys, inner)
        else:
            inner.add_done_callback(lambda done: self._settle(keys, _outcome(done)))

    def _settle(self, keys: list[Key], outcome: list[ContinuationScore] | BaseException) -> None:
        """Store a unit, then hand it out; an error goes to all who wait."""
        with self._lock:
            claims = [self._claimed.pop(key) for key in keys]
            if not isinstance(outcome, BaseException):
                outcome = _attempt(self._store_unit, keys, claims, outcome) or outcome
        for row, claim in enumerate(claims):
            if isinstance(outcome, BaseException):
                claim.future.set_exception(outcome)
            else:
                claim.future.set_result(outcome[row])

    def _store_unit(self, keys: list[Key], claims: list[_Claim], scores: list[ContinuationScore]) -> None:
        if len(scores) != len(keys):
            raise ValueError(f"the LM gave {len(scores)} scores for {len(keys)} inputs")
        self._store(
            [NewScore(key, score, claim.with_tokens) for key, score, claim in zip(keys, scores, claims, strict=True)]
        )

    def _store(self, scores: list[NewScore]) -> None:
        """Write scores, and the hits and misses that the file has not been told of."""
        hits, misses = self.num_hits, self.num_misses
        self._cache.store(self.identity, scores, hits - self._hits_stored, misses - self._misses_stored)
        self._hits_stored, self._misses_stored = hits, misses


def gather(
    answers: Sequence["Answer | Future[ContinuationScore]"], shape: Callable[[ContinuationScore], Answer]
) -> "Future[list[Answer]]":
    """One future for all, in order, those under way as `shape` makes them; the first error in order is its error."""
    whole: Future[list[Answer]] = Future()
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


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the error it raised."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for the scores
        return error


def _outcome(done: "Future[list[ContinuationScore]]") -> list[ContinuationScore] | BaseException:
    if done.cancelled():
        return CancelledError()
    return done.exception() or done.result()
