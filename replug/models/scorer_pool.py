"""The frozen LM as a pool of Ray actors: the same protocol as one LM, with work done elsewhere.

One submitted call is scored by one replica in one piece, so its numbers do not depend on load. A GPU's replica gets
several units in one call, since a call costs the trainer more than all else of a unit, and computes them one by one.
Replicas are compared by a probe when they come up: nobody would notice one with other weights, or with broken memory.
A replica may hold a second LM (`SecondLM`), so that neither waits for devices that the other has to itself.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.cluster.background import InlineExecutor
from replug.cluster.gpus import USE, Busy, keep_to_memory_bound, own_devices
from replug.cluster.packing import SCORER
from replug.cluster.places import place
from replug.messages import CollectedWarnings
from replug.models.batching import units_of_similar_length
from replug.models.black_box_lm import (
    AsyncLM,
    Call,
    ContinuationScore,
    LaunchingLM,
    LocalLM,
    Meter,
    Pending,
    ScoreCall,
    Sum,
    mapped,
    reading,
    sum_of,
)
from replug.models.hardware import available_cores
from replug.models.local.local_source import LocalSource

log = logging.getLogger(__name__)

PROBE = (["The capital of France is", "one two three four five"], [" Paris, and that of Italy is Rome.", " six seven"])
# Nats by which replicas on different hardware may differ on the probe's tokens, at most and on average.
PROBE_TOLERANCE = (0.5, 0.1)
CALLS_AT_ONCE = 2  # that a replica has: one on its device, the next being tokenized
UNITS_PER_CALL_GPU = 8  # a unit takes a GPU a moment, and processors seconds that a killed replica would lose

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TimedScores:
    """A replica's scores of one unit, or their sums alone, and what they cost."""

    scores: list[ContinuationScore] | list[Sum]
    replica: int
    began: float  # seconds of the replica's own clock
    seconds: float
    tokens: int
    padded_tokens: int
    halved_passes: int
    warnings: dict[str, str]  # new ones, by their places in the code
    devices: tuple[str, ...] = ()


class Scorer:
    """One replica: a plain class, made an actor where the pool is built. An LM is loaded by the first call to it.

    All that computes runs in one thread, call after call. Two calls may be with a replica at once: the second is
    tokenized while the device is at the first, and its passes are launched behind those of the first, whose scores its
    own thread waits for.
    """

    def __init__(
        self, lm: LocalSource, threads: int, number: int = 0, spread: bool = False, second: LocalSource | None = None
    ) -> None:
        keep_to_memory_bound()
        torch.set_num_threads(threads)
        self._device = ThreadPoolExecutor(1, "device", torch.set_num_threads, (threads,))
        self._tokenizer, self._clock = threading.Lock(), threading.Lock()
        self._free_at = 0.0  # when the device had done all that is fetched
        self._loader, self._second_loader, self._spread = lm, second, spread
        self._number, self._devices = number, own_devices()
        self._warnings = CollectedWarnings()
        logging.getLogger("replug").addHandler(self._warnings)

    @cached_property
    def _lm(self) -> LocalLM:
        return self._loader.load(self._spread)

    @cached_property
    def _second(self) -> LocalLM:
        assert self._second_loader is not None
        return self._second_loader.load(self._spread)

    def probe(self) -> list[np.ndarray]:
        """Return log-probs of texts that are the same for every replica, by each of its LMs."""

        def scored() -> list[np.ndarray]:
            lms = [self._lm, *([self._second] if self._second_loader else [])]
            return [score.token_logprobs for lm in lms for score in lm.score(*PROBE)]

        return self._compute(scored)

    def score(self, units: Sequence[ScoreCall], by_second: bool = False) -> list[TimedScores]:
        """Return the scores of each unit. All are launched before the first is waited for."""
        lm = self._second if by_second else self._lm
        return [answer() for answer in [self._launched(lm, unit) for unit in units]]

    def _launched(self, lm: LocalLM, call: ScoreCall) -> Callable[[], TimedScores]:
        """Launch a unit; return what waits for it. One behind another begins where that one ends, by its seconds."""
        scoring = self._scoring(lm, call)

        def launch() -> tuple[Pending, float, float | None, list[int]]:
            counts = lm.counts
            before, began = astuple(counts), time.monotonic()
            scores = scoring()
            ended = time.monotonic() if scores.done() else None
            return scores, began, ended, [now - then for now, then in zip(astuple(counts), before, strict=True)]

        pending, launched, at_once, (tokens, padded, halved) = self._compute(launch)

        def answer() -> TimedScores:
            scores = pending.result()
            ended = at_once or time.monotonic()
            with self._clock:
                began = min(max(launched, self._free_at), ended)
                self._free_at = max(self._free_at, ended)
            said = list(map(sum_of, scores)) if call.sums_only else scores
            warnings = self._warnings.take()
            return TimedScores(
                said, self._number, began, ended - began, tokens, padded, halved, warnings, self._devices
            )

        return answer

    def run(self, call: Call, by_second: bool = False) -> list[Any]:
        """Return the answers or samples of a call."""
        return self._compute(lambda: call.run(self._second if by_second else self._lm))

    def _compute(self, work: Callable[[], Result]) -> Result:
        return self._device.submit(work).result()

    def _scoring(self, lm: LocalLM, call: ScoreCall) -> Callable[[], Pending]:
        """Return the work that is left for the device: all of it where the LM does not tokenize apart."""
        if not isinstance(lm, LaunchingLM):
            return partial(InlineExecutor().submit, call.run, lm)
        with self._tokenizer:  # a tokenizer of transformers has settings that a call may change
            tokenized = lm.tokenize(call.prefixes, call.continuations, opening=call.opening, **reading(call.read))
        return partial(lm.launch, tokenized)


class ScorerPool(AsyncLM):
    """An `AsyncLM` over up to `num_replicas` actors, which hold the LM `second` too where one is given."""

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
        self.second = SecondLM(self, second, on_gpu=gpus > 0) if second else None
        self._unit_tokens = lm.tokens_per_unit(on_gpu=gpus > 0)
        self._units_per_call = UNITS_PER_CALL_GPU if gpus else 1
        threads = threads or max(1, available_cores() // num_replicas)
        env, actor = thread_env(threads)["env_vars"], ray.remote(Scorer)
        self._meter, self._halved, self._warned = Meter(), 0, set[str]()
        self._reference: list[np.ndarray] | None = None
        shipped = ray.put(lm)  # once for all replicas; raises TypeError for what cannot be pickled
        also = ray.put(second)
        self.pool = ActorPool(
            lambda number: actor.options(**place(SCORER, number, gpus, env), max_concurrency=CALLS_AT_ONCE).remote(
                shipped, threads, number, gpus > 1, also
            ),
            num_replicas,
            "scorer",
            max_in_flight=CALLS_AT_ONCE,
            max_attempts=max_attempts,
            timeout_seconds=timeout_seconds,
            validate=self._validate,
        )

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return units_of_similar_length(prefixes, continuations, self._unit_tokens)

    def submit_call(self, call: Call, by_second: bool = False) -> "Future[list[Any]]":
        """Have one replica compute the call in one piece, so that its numbers do not depend on load."""
        if not isinstance(call, ScoreCall):
            return self.pool.submit("run", call, by_second)
        return self._scores([call], by_second)

    def submit_units(
        self, call: Call, units: Sequence[list[int]], by_second: bool = False
    ) -> "list[tuple[list[int], Future[list[Any]]]]":
        """Have each replica compute a few units, one by one: a call to an actor costs the trainer most of a unit."""
        if not isinstance(call, ScoreCall):
            return [(unit, self.submit_call(call.take(unit), by_second)) for unit in units]
        size = min(self._units_per_call, -(-len(units) // max(1, self.pool.num_up)))
        num_calls = -(-len(units) // size)
        calls = [units[first::num_calls] for first in range(num_calls)]  # long units and short ones
        return [
            ([row for unit in some for row in unit], self._scores([call.take(unit) for unit in some], by_second))
            for some in calls
        ]

    def metrics(self) -> dict[str, float]:
        """Return rates and shares since the last call, and counts since the start."""
        counts, num_up = self.pool.counts, self.pool.num_up
        rates, sums = self._meter.read(num_up)
        return {
            **rates,
            "batch_fill": sums["tokens"] / sums["padded_tokens"] if sums["padded_tokens"] else 1.0,
            "halved_passes": float(self._halved),
            "replicas": float(num_up),
            "respawns": float(counts.respawns),
            "retries": float(counts.retries),
            "queue_length": float(self.pool.num_waiting),
            "queue_wait_seconds": counts.waited_seconds / max(1, counts.calls),
        }

    def close(self) -> None:
        self.pool.close()

    def _scores(self, units: Sequence[ScoreCall], by_second: bool = False) -> "Future[list[Any]]":
        answers = self.pool.submit("score", units, by_second, times=len(units))
        return mapped(answers, lambda answers: [score for answer in answers for score in self._note(answer)])

    def _note(self, answer: TimedScores) -> list[ContinuationScore] | list[Sum]:
        self._meter.add(tokens=answer.tokens, padded_tokens=answer.padded_tokens, busy_seconds=answer.seconds)
        USE.note("score", Busy(answer.seconds, answer.devices))
        self._halved += answer.halved_passes
        for source, warning in answer.warnings.items():
            if source not in self._warned:
                self._warned.add(source)
                log.warning(f"scorer {answer.replica}: {warning}")
        return answer.scores

    def _validate(self, number: int, probe: list[np.ndarray]) -> str | None:
        """Compare a replica with the first that came up; return what is wrong with it, or None."""
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


class SecondLM(AsyncLM):
    """An `AsyncLM` of the second LM on the replicas of a pool, which ends with the pool."""

    def __init__(self, pool: ScorerPool, lm: LocalSource, on_gpu: bool) -> None:
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._pool, self._unit_tokens = pool, lm.tokens_per_unit(on_gpu)

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return units_of_similar_length(prefixes, continuations, self._unit_tokens)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        return self._pool.submit_call(call, by_second=True)

    def submit_units(self, call: Call, units: Sequence[list[int]]) -> "list[tuple[list[int], Future[list[Any]]]]":
        return self._pool.submit_units(call, units, by_second=True)

    def metrics(self) -> dict[str, float]:
        """Return those of the pool."""
        return self._pool.metrics()

    def close(self) -> None:
        """The pool closes its replicas."""
