"""The frozen LM as a pool of Ray actors: the same protocol as one LM, with work done elsewhere.

One submitted call is scored by one replica in one piece, so its numbers do not depend on load. `units` says
which pairs are worth scoring together: of similar length, a few passes' worth. Replicas are compared by a
probe when they come up, since one with other weights, or broken memory, would poison the training unseen.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import ray
import torch

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.models.batching import token_budget_batches
from replug.models.black_box_lm import ContinuationScore, LocalLM
from replug.models.generation import Generated, GenerationOptions
from replug.models.hardware import DTYPES, TOKENS_PER_PASS, TOKENS_PER_PASS_GPU, available_cores, default_device
from replug.models.local.stand_in_lm import StandInLM

# What a unit holds: enough passes for a replica to sort by length what bytes only guess, and to be worth a call.
PASSES_PER_UNIT, PASSES_PER_UNIT_GPU = 8, 1
BYTES_PER_TOKEN = 4  # of English and code; a guess, which costs padding where it is wrong and nothing else
CHOICE_CHARACTERS = 8  # a continuation so short is most likely one token, as the letters of a question are
PROBE = (["The capital of France is", "one two three four five"], [" Paris, and that of Italy is Rome.", " six seven"])
# Nats by which replicas on different hardware may differ on the probe's tokens, at most and on average.
PROBE_TOLERANCE = (0.5, 0.1)


@dataclass(frozen=True, slots=True)
class LMSpec:
    """All that a process needs to load the LM.

    `path` is a folder or hub name, or `stand_in`; `stand_in:0.05` sleeps so many seconds in every call.
    """

    path: str
    dtype: str = "float32"
    tokens_per_batch: int | None = None
    compile: bool = False

    @property
    def is_stand_in(self) -> bool:
        return self.path.split(":")[0] == "stand_in"

    def load(self, device: torch.device | str | None = None, spread: bool = False) -> LocalLM:
        if self.is_stand_in:
            return StandInLM(float(self.path.partition(":")[2] or 0))
        from replug.models.local.hf_lm import HuggingFaceLM  # seconds to import, which the stand-in can do without

        return HuggingFaceLM(
            self.path, DTYPES[self.dtype], device or default_device(), self.tokens_per_batch, self.compile, spread
        )

    @property
    def identity(self) -> str:
        """As the loaded LM's, without loading it."""
        if self.is_stand_in:
            return StandInLM.identity
        from replug.models.local.hf_lm import lm_identity

        return lm_identity(self.path, DTYPES[self.dtype])

    @property
    def max_tokens(self) -> int | None:
        """As the loaded LM's, without loading it."""
        if self.is_stand_in:
            return None
        from transformers import AutoConfig

        return getattr(AutoConfig.from_pretrained(self.path), "max_position_embeddings", None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a replica returns for one call: the scores, and what they cost."""

    scores: list[ContinuationScore]
    replica: int
    began: float  # seconds of the replica's own clock
    seconds: float
    tokens: int
    padded_tokens: int


class Scorer:
    """One replica: a plain class, made an actor where the pool is built."""

    def __init__(self, spec: LMSpec, threads: int, number: int = 0, spread: bool = False) -> None:
        torch.set_num_threads(threads)
        self._lm = spec.load(spread=spread)
        self._number = number

    def probe(self) -> list[np.ndarray]:
        """Log-probs of texts that are the same for every replica."""
        return [score.token_logprobs for score in self._lm.score(*PROBE)]

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> Answer:
        counts = self._lm.counts
        tokens, padded, began = counts.tokens, counts.padded_tokens, time.monotonic()
        scores = self._lm.score(prefixes, continuations)
        seconds = time.monotonic() - began
        return Answer(scores, self._number, began, seconds, counts.tokens - tokens, counts.padded_tokens - padded)

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None) -> list[str]:
        return self._lm.generate(prompts, max_new_tokens, stop)

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self._lm.generate_ensemble(prompts, weights, options)


class ScorerPool:
    """An `AsyncLM` over up to `num_replicas` actors."""

    def __init__(
        self,
        spec: LMSpec,
        num_replicas: int = 1,
        threads: int | None = None,
        gpus: float = 0.0,
        timeout_seconds: float = 600.0,
        max_attempts: int = 5,
    ) -> None:
        self.identity = spec.identity
        self.max_tokens = spec.max_tokens
        self.unit_bytes = _unit_bytes(spec, gpus)
        threads = threads or max(1, available_cores() // num_replicas)
        actor = ray.remote(Scorer).options(num_cpus=1, num_gpus=gpus, runtime_env=thread_env(threads))
        self._meter = PoolMeter(num_replicas)
        self._reference: list[np.ndarray] | None = None
        self.pool = ActorPool(
            lambda number: actor.remote(spec, threads, number, gpus > 1),
            num_replicas,
            "scorer",
            max_attempts=max_attempts,
            timeout_seconds=timeout_seconds,
            validate=self._validate,
        )

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        """Rows of similar length, by bytes: no tokenizer is needed here, and a replica sorts its unit by tokens.

        Choices after one prefix stay together: the replica reads their prefix once.
        """
        together: dict[tuple, list[int]] = {}
        for row, (prefix, continuation) in enumerate(zip(prefixes, continuations, strict=True)):
            is_choice = len(continuation) <= CHOICE_CHARACTERS
            together.setdefault((prefix,) if is_choice else (prefix, row), []).append(row)
        groups = list(together.values())
        lengths = [
            len(prefixes[rows[0]].encode()) + sum(len(continuations[row].encode()) for row in rows) for rows in groups
        ]
        return [
            [row for group in batch for row in groups[group]]
            for batch in token_budget_batches(lengths, self.unit_bytes)
        ]

    def submit(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ContinuationScore]]":
        scores: Future[list[ContinuationScore]] = Future()
        answer = self.pool.submit("score", list(prefixes), list(continuations))
        answer.add_done_callback(lambda done: self._hand_out(done, scores))
        return scores

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        return self.pool.submit("generate", list(prompts), max_new_tokens, stop).result()

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """One answer is one replica's work, so it does not depend on load."""
        return self.pool.submit("generate_ensemble", list(prompts), list(weights), options)

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self.submit_ensemble(prompts, weights, options).result()

    def metrics(self) -> dict[str, float]:
        """Rates and shares since the last call, and counts since the start."""
        counts, num_up = self.pool.counts, self.pool.num_up
        return {
            **self._meter.read(num_up),
            "replicas": float(num_up),
            "respawns": float(counts.respawns),
            "retries": float(counts.retries),
            "queue_length": float(self.pool.num_waiting),
            "queue_wait_seconds": counts.waited_seconds / max(1, counts.calls),
        }

    def close(self) -> None:
        self.pool.close()

    def _hand_out(self, done: "Future[Answer]", scores: "Future[list[ContinuationScore]]") -> None:
        error = done.exception()
        if error is not None:
            return scores.set_exception(error)
        self._meter.add(done.result())
        return scores.set_result(done.result().scores)

    def _validate(self, number: int, probe: list[np.ndarray]) -> str | None:
        """The first replica that comes up is what the others are compared with."""
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


class PoolMeter:
    """Adds up what replicas report; `read` gives the rates since the last prefix group."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._answers: list[Answer] = []

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._answers.append(Answer([], answer.replica, 0.0, answer.seconds, answer.tokens, answer.padded_tokens))

    def read(self, num_up: int) -> dict[str, float]:
        with self._lock:
            answers, self._answers = self._answers, []
            seconds, self._since = time.monotonic() - self._since, time.monotonic()
        tokens, padded = sum(a.tokens for a in answers), sum(a.padded_tokens for a in answers)
        return {
            "tokens_per_second": tokens / seconds,
            "busy_share": min(1.0, sum(a.seconds for a in answers) / (seconds * max(1, num_up))),
            "batch_fill": tokens / padded if padded else 1.0,
            **{
                f"replica_{number}/tokens_per_second": _rate([a for a in answers if a.replica == number])
                for number in range(self._num_replicas)
            },
        }


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens a second while busy."""
    seconds = sum(a.seconds for a in answers)
    return sum(a.tokens for a in answers) / seconds if seconds else 0.0


def _unit_bytes(spec: LMSpec, gpus: float) -> int:
    passes, default = (PASSES_PER_UNIT_GPU, TOKENS_PER_PASS_GPU) if gpus else (PASSES_PER_UNIT, TOKENS_PER_PASS)
    return BYTES_PER_TOKEN * passes * (spec.tokens_per_batch or default)
