"""The frozen LM as a pool of Ray actors, with the same protocol as one LM.

One submitted call is scored by one replica in one piece, so its numbers do not depend on load. A GPU's replica gets
several units in one call, since the call is most of a unit's cost to the trainer, and computes them one by one.
Replicas are compared by a probe when they start: other weights or broken memory would otherwise go unnoticed. A replica
may hold a second LM (`ScorerPool.second`), so that both use all devices.
"""

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.cluster.background import InlineExecutor
from replug.cluster.layout import SCORER
from replug.cluster.places import keep_to_memory_bound, place
from replug.models.black_box_lm import (
    AsyncLM,
    BlackBoxLM,
    Call,
    ContinuationScore,
    Meter,
    ScoreCall,
    Sum,
    mapped,
    pass_counts,
    reading,
    sum_of,
)
from replug.models.hardware import available_cores
from replug.models.lm_source import LocalSource

PROBE = (["The capital of France is", "one two three four five"], [" Paris, and that of Italy is Rome.", " six seven"])
# Nats by which replicas on different hardware may differ on the probe's tokens, at most and on average.
PROBE_TOLERANCE = (0.5, 0.1)
CALLS_AT_ONCE = 2  # of a replica: one on its device, the next in its tokenizer
UNITS_PER_CALL_GPU = 8  # a unit takes a GPU a moment, but a CPU seconds that a killed replica would lose

Result = TypeVar("Result")


# A replica's scores of one unit, or their sums, and their cost (the passes' counts and `busy_seconds`).
TimedScores = tuple[list[ContinuationScore] | list[Sum], dict[str, float]]


class Scorer:
    """One replica: a plain class that the pool makes an actor. The first call loads the LMs.

    All computation runs in one thread, call after call. A replica may have two calls at once: it tokenizes the second
    while the device computes the first, and launches the second's passes behind the first's. Each call waits for its
    scores in a separate thread.
    """

    def __init__(self, lm: LocalSource, threads: int, spread: bool = False, second: LocalSource | None = None) -> None:
        keep_to_memory_bound()
        torch.set_num_threads(threads)
        self._device = ThreadPoolExecutor(1, "device", torch.set_num_threads, (threads,))
        self._tokenizer, self._clock = threading.Lock(), threading.Lock()
        self._free_at = 0.0  # when the device finished the last fetched unit
        self._loaders, self._spread = [lm, *([second] if second else [])], spread

    @cached_property
    def _lms(self) -> list[BlackBoxLM]:
        return [loader.load(self._spread) for loader in self._loaders]

    def probe(self) -> list[np.ndarray]:
        """Return log-probs of fixed texts by each of the LMs, for a comparison of replicas."""

        return self._compute(lambda: [score.token_logprobs for lm in self._lms for score in lm.score(*PROBE)])

    def score(self, units: Sequence[ScoreCall], number: int = 0) -> list[TimedScores]:
        """Return the scores of each unit by the LM of this number. All units launch before the first wait."""
        return [answer() for answer in [self._launched(self._lms[number], unit) for unit in units]]

    def _launched(self, lm: BlackBoxLM, call: ScoreCall) -> Callable[[], TimedScores]:
        """Launch a unit; return a function that waits for it. Busy seconds of successive units do not overlap."""
        scoring = self._scoring(lm, call)

        def launch() -> tuple[Any, float, float | None, Counter[str]]:
            before, began = Counter(pass_counts(lm)), time.monotonic()
            scores = scoring()
            ended = time.monotonic() if scores.done() else None
            return scores, began, ended, pass_counts(lm) - before

        pending, launched, at_once, counts = self._compute(launch)

        def answer() -> TimedScores:
            scores = pending.result()
            ended = at_once or time.monotonic()
            with self._clock:
                began = min(max(launched, self._free_at), ended)
                self._free_at = max(self._free_at, ended)
            results = list(map(sum_of, scores)) if call.sums_only else scores
            return results, {**counts, "busy_seconds": ended - began}

        return answer

    def run(self, call: Call, number: int = 0) -> list[Any]:
        """Return the answers or samples of a call by the LM of this number."""
        return self._compute(lambda: call.run(self._lms[number]))

    def _compute(self, work: Callable[[], Result]) -> Result:
        return self._device.submit(work).result()

    def _scoring(self, lm: Any, call: ScoreCall) -> Callable[[], Any]:
        """Tokenize a call and return the work left for the device: all of it if the LM has no `launch`."""
        if not hasattr(lm, "launch"):
            return partial(InlineExecutor().submit, call.run, lm)
        with self._tokenizer:  # a call may change settings of a tokenizer of transformers
            tokenized = lm.tokenize(call.prefixes, call.continuations, opening=call.opening, **reading(call.read))
        return partial(lm.launch, *tokenized)


class ScorerPool(AsyncLM):
    """An `AsyncLM` over up to `num_replicas` actors.

    With a `second` LM, the actors hold it too, and the attribute `second` is its `AsyncLM`, which ends with the pool.
    """

    def __init__(
        self,
        lm: LocalSource,
        num_replicas: int = 1,
        threads: int | None = None,
        gpus: float = 0.0,
        timeout_seconds: float = 600.0,
        max_attempts: int = 5,
        second: LocalSource | None = None,
    ) -> None:
        self.identity = lm.identity
        self.max_tokens = lm.max_tokens
        self.unit_tokens = lm.tokens_per_unit(on_gpu=gpus > 0)
        self._number = 0  # of the LM in its replicas
        self._units_per_call = UNITS_PER_CALL_GPU if gpus else 1
        threads = threads or max(1, available_cores() // num_replicas)
        env, actor = thread_env(threads)["env_vars"], ray.remote(Scorer)
        self._meter = Meter()
        self._reference: list[np.ndarray] | None = None
        shipped = ray.put(lm)  # once for all replicas; raises TypeError for an unpicklable LM
        also = ray.put(second)
        self.pool = ActorPool(
            lambda number: actor.options(**place(SCORER, number, env), max_concurrency=CALLS_AT_ONCE).remote(
                shipped, threads, gpus > 1, also
            ),
            num_replicas,
            "scorer",
            max_in_flight=CALLS_AT_ONCE,
            max_attempts=max_attempts,
            timeout_seconds=timeout_seconds,
            validate=self._validate,
        )
        self.second: ScorerPool | None = None
        if second:
            self.second = copy.copy(self)  # the same replicas, counts and meter
            self.second.identity, self.second.max_tokens = second.identity, second.max_tokens
            self.second.unit_tokens, self.second._number = second.tokens_per_unit(on_gpu=gpus > 0), 1

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Submit the call to one replica in one piece, so that its numbers do not depend on load."""
        if not isinstance(call, ScoreCall):
            return self.pool.submit("run", call, self._number)
        return self._scores([call])

    def submit_units(self, call: Call) -> "list[tuple[list[int], Future[list[Any]]]]":
        """Submit a few units at once to each replica: the call to an actor is most of a unit's cost to the trainer."""
        if not isinstance(call, ScoreCall):
            return super().submit_units(call)
        units = self.units(call)
        size = min(self._units_per_call, -(-len(units) // max(1, self.pool.num_up)))
        num_calls = -(-len(units) // size)
        calls = [units[first::num_calls] for first in range(num_calls)]  # long and short units mixed
        return [
            ([row for unit in some for row in unit], self._scores([call.take(unit) for unit in some])) for some in calls
        ]

    def metrics(self) -> dict[str, float]:
        """Return rates and shares since the last call, and counts since the start."""
        pool, num_up = self.pool, self.pool.num_up
        return {
            **self._meter.read(num_up)[0],
            "replicas": float(num_up),
            "respawns": float(pool.num_respawns),
            "retries": float(pool.num_retries),
            "queue_length": float(pool.num_waiting),
        }

    def close(self) -> None:
        """End the replicas; does nothing on the second LM."""
        if not self._number:
            self.pool.close()

    def _scores(self, units: Sequence[ScoreCall]) -> "Future[list[Any]]":
        def metered(answers: list[TimedScores]) -> list[Any]:
            for _, costs in answers:
                self._meter.add(**costs)
            return [score for scores, _ in answers for score in scores]

        return mapped(self.pool.submit("score", units, self._number, times=len(units)), metered)

    def _validate(self, number: int, probe: list[np.ndarray]) -> str | None:
        """Compare a replica with the first one; return the fault, or None."""
        if not all(np.isfinite(logprobs).all() for logprobs in probe):
            return "log-probs that are not finite"
        if self._reference is None:
            self._reference = probe
        if [len(logprobs) for logprobs in probe] != [len(logprobs) for logprobs in self._reference]:
            return "other tokens than the other replicas'"
        most, mean = PROBE_TOLERANCE
        differences = np.abs(np.concatenate(probe) - np.concatenate(self._reference))
        if differences.max() > most or differences.mean() > mean:
            return f"log-probs up to {differences.max():.2f} nats away from the other replicas'"
        return None
