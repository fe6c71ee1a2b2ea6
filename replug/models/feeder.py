"""The pool of scorers and its cache in a process of their own, where a run has many replicas.

Prompts, their hashes, the file, and calls to replicas take an interpreter 23 us a pair and 0.3 ms a replica, and tokens
of prompts more (docs/planning.md), in which rank 0 cannot train. So rank 0 sends the texts of a step in one message,
and gets its sums in one array. Calls begin in the order they are sent in, and their units follow from the texts, so
scores are those of a pool in rank 0.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.cluster.places import NO_GPU, Places, shared_places, take_places
from replug.config.schema import LMConfig
from replug.data.records import Example
from replug.messages import CollectedWarnings
from replug.models.black_box_lm import AsyncLM, Call, ScoreCall, mapped
from replug.models.build import cache_path, prompt_template
from replug.models.hardware import available_cores
from replug.models.lm_source import LocalSource
from replug.models.prompt import prompts_of
from replug.models.score_cache import CachingLM

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 256  # each waits in the feeder for replicas, which have a time-out

Answer = tuple[Any, dict[str, float], dict[str, str]]  # and metrics, and new warnings by their places in the code


class Feeder:
    """A plain class, made an actor by `FedLM`. Its methods are coroutines, which begin in the order of their calls."""

    def __init__(self, lm: LMConfig, source: LocalSource, cache: Path, places: Places) -> None:
        take_places(places)
        self._warnings = CollectedWarnings()
        logging.getLogger("replug").addHandler(self._warnings)
        self._template = prompt_template(lm, source)
        self._lm = CachingLM(source.open(lm), cache)

    async def sums(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> Answer:
        """Return the sums of each example's continuation after each of its texts."""
        return await self._answer(self._lm.submit_sums(*prompts_of(self._template, examples, texts)))

    async def call(self, call: Call) -> Answer:
        """Return what `submit_call` gives, or `submit_sums`."""
        if isinstance(call, ScoreCall) and call.sums_only:
            return await self._answer(self._lm.submit_sums(call.prefixes, call.continuations))
        return await self._answer(self._lm.submit_call(call))

    async def _answer(self, future: Future) -> Answer:
        result = await asyncio.wrap_future(future)
        metrics = {**self._lm.metrics(), "truncated": float(self._template.num_truncated)}
        return result, metrics, self._warnings.take()


class FedLM(AsyncLM):
    """A `CachingLM` over a pool of scorers, in another process of this node. One that dies is started again.

    `cache` is the default place of its file.
    """

    def __init__(self, lm: LMConfig, source: LocalSource, cache: Path) -> None:
        self.identity, self.max_tokens = source.identity, source.max_tokens
        self._metrics = {"hits": 0.0, "misses": 0.0}  # until its first answer
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        env = {"env_vars": {**thread_env(available_cores())["env_vars"], **NO_GPU, "TOKENIZERS_PARALLELISM": "true"}}
        feeder = ray.remote(Feeder).options(num_cpus=0, scheduling_strategy=here, runtime_env=env)
        given = (lm, source, cache_path(lm, cache).absolute(), shared_places())
        self._pool = ActorPool(
            lambda _: feeder.remote(*given), 1, "feeder of scorers", CALLS_AT_ONCE, timeout_seconds=float("inf")
        )

    def submit_examples(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> "Future[np.ndarray]":
        """Return a future of sums of log-probs (nats) and numbers of tokens, float64 [B * K, 2].

        They are those of each of the B examples after each of its K texts.
        """
        return self._submitted("sums", examples, texts)

    def submit_sums(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[np.ndarray]":
        """Return a future of sums and numbers of tokens, as `CachingLM` does."""
        return self.submit_call(ScoreCall(prefixes, continuations, sums_only=True))

    def submit_call(self, call: Call) -> "Future[Any]":
        """Have the feeder answer the call, which makes units of it."""
        return self._submitted("call", call)

    def metrics(self) -> dict[str, float]:
        """Return the feeder's metrics at its last answer, with the texts that its template cut."""
        return self._metrics

    def close(self) -> None:
        """End the feeder, and with it the replicas that it owns."""
        self._pool.close()

    def _submitted(self, method: str, *arguments: Any) -> "Future[Any]":
        return mapped(self._pool.submit(method, *arguments), self._note)

    def _note(self, answer: Answer) -> Any:
        result, self._metrics, warnings = answer
        for warning in warnings.values():
            log.warning(warning)
        return result.copy() if isinstance(result, np.ndarray) else result  # Ray's may not be written
