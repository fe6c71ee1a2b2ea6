"""Answers asked of an LM once: read from the file of scores, awaited where a call under way has the same, else asked.

The rules are those of scores (`models/caching_lm.py`). Calls claim their answers in the order in which they are
submitted. An answer is stored, by a thread of its own, before anyone has it: after kill -9 nothing that somebody has
seen is asked again. One call is one answer, so the answers stored do not depend on which calls came together.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from replug.cluster.futures import attempt, outcome
from replug.models.black_box_lm import AsyncLM
from replug.models.generation import Generated, GenerationOptions
from replug.models.generation_cache import GenerationCache, generation_key
from replug.models.score_cache import HitCounts, Key
from replug.models.score_writer import UnitWriter


@dataclass(frozen=True, slots=True)
class _Answered:
    """What the LM said to a call: its answer, or why there is none."""

    key: Key
    outcome: Generated | BaseException


class CachedGenerations:
    """Asks `lm` only for what `cache` does not hold. `lock` is round all that happens to the file, and `counts`."""

    def __init__(self, lm: AsyncLM, cache: GenerationCache, lock: threading.Lock, counts: HitCounts) -> None:
        self._lm, self._cache, self._lock, self._counts = lm, cache, lock, counts
        self._identity = lm.identity
        self._claimed: dict[Key, Future[Generated]] = {}
        self._writer = UnitWriter(self._settle)

    def submit(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """Answer from calls under way, from the cache, and from the LM, in this order."""
        key = generation_key(self._identity, prompts, weights, options)
        with self._lock:
            answer = self._claimed.get(key) or self._stored(key)
            self._counts.add(hits=int(answer is not None), misses=int(answer is None))
            if answer is not None:
                return answer
            answer = self._claimed[key] = _running()
        self._ask(key, prompts, weights, options)
        return answer

    def close(self) -> None:
        """Write what waits. The LM is closed before."""
        self._writer.close()

    def _stored(self, key: Key) -> "Future[Generated] | None":
        found = self._cache.answers([key])
        if key not in found:
            return None
        answer: Future[Generated] = Future()
        answer.set_result(found[key])
        return answer

    def _ask(self, key: Key, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions) -> None:
        """An error that the LM raises at once gives the claim back too."""
        inner = attempt(self._lm.submit_ensemble, prompts, weights, options)
        if isinstance(inner, Exception):
            self._writer.put(_Answered(key, inner), is_last=True)
        else:
            inner.add_done_callback(lambda done: self._writer.put(_Answered(key, outcome(done)), is_last=True))

    def _settle(self, answered: list[_Answered]) -> None:
        """Store answers, then hand them out. Runs in the writer's thread."""
        new = {one.key: one.outcome for one in answered if not isinstance(one.outcome, BaseException)}
        with self._lock:
            error = attempt(self._store, new) if new else None
            waiting = [self._claimed.pop(one.key) for one in answered]
        for one, future in zip(answered, waiting, strict=True):
            if isinstance(one.outcome, BaseException):
                future.set_exception(one.outcome)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(one.outcome)

    def _store(self, answers: dict[Key, Generated]) -> None:
        self._cache.store(self._identity, answers, *self._counts.untold)
        self._counts.are_told()


def _running() -> "Future[Generated]":
    """Several may wait for it, so none of them can cancel it."""
    answer: Future[Generated] = Future()
    answer.set_running_or_notify_cancel()
    return answer
