"""The two services beside the trainer: the LM behind its cache, and the index.

With many scorer replicas, their pool and its cache are in a separate process, the feeder. Prompts, their hashes, the
cache file, and calls to replicas take an interpreter 23 us a pair and 0.3 ms a replica, and tokens of prompts more
(docs/planning.md); rank 0 could not train meanwhile. So rank 0 sends the texts of a step in one message, and receives
the sums in one array. Calls begin in the order they are sent, and scoring batches follow from the texts, so scores
equal the scores of a pool in rank 0.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.cluster.interruption import Interruption
from replug.cluster.places import NO_GPU, Places, scorer_actors, shared_places, take_places
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.schema import Config, LMConfig
from replug.data.folder import sole_writer
from replug.data.records import Example
from replug.data.store import PreparedSet
from replug.index_workers.build import watched_texts
from replug.index_workers.service import IndexService
from replug.messages import CollectedWarnings
from replug.models.black_box_lm import AsyncLM, Call, mapped
from replug.models.build import cache_path, encoder_location, located, opened_lm, prompt_template
from replug.models.encoder_files import document_encoder
from replug.models.hardware import available_cores, multiplies_bfloat16
from replug.models.lm_source import LMSource, LocalSource
from replug.models.packaged import resolve_lm_path
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.planning.memory import run_sizes

log = logging.getLogger(__name__)

MOST_FED_HERE = 4  # replicas; more, as on a node of eight GPUs, have a feeder
CALLS_AT_ONCE = 256  # each waits in the feeder for replicas, which have a time-out

Answer = tuple[Any, dict[str, float], dict[str, str]]  # result, metrics, and new warnings by their places in the code


@dataclass(frozen=True, slots=True)
class Workers:
    """Holds the two services beside the trainer, and the LM's prompt template."""

    lm: AsyncLM
    index: IndexService
    template: PromptTemplate


@contextmanager
def start_index(
    config: Config,
    roles: tuple[str, ...],
    data: PreparedSet,
    index_root: Path,
    interruption: Interruption | None = None,
) -> Iterator[tuple[Config, IndexService]]:
    """Start Ray for these roles and the index service; see `start_workers`."""
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with ray_cluster(config, roles, interruption, sizes) as laid_out:
        require_seen_by_all(index_root, [data.folder, data.corpus_path, *local_models(laid_out)])
        with (
            sole_writer(index_root),
            closing(IndexService(index_root, watched_texts(data), laid_out.retrieve.k)) as index,
        ):
            yield laid_out, index


@contextmanager
def start_workers(
    config: Config,
    roles: tuple[str, ...],
    source: LMSource,
    data: PreparedSet,
    index_root: Path,
    scores: Path,
    interruption: Interruption | None = None,
) -> Iterator[tuple[Config, Workers]]:
    """Start Ray for these roles and the LM's, the LM behind its cache, and the index service.

    Yields the configuration with the assigned resources. All are stopped at the end. Raises UserError if a node of the
    cluster does not see the files.
    """
    # The index first: scorers may wait for room, its actors may not.
    with start_index(config, (*roles, *source.roles), data, index_root, interruption) as (laid_out, index):  # noqa: SIM117
        with started_lm(laid_out.lm, source, scores) as lm:
            yield laid_out, Workers(lm, index, prompt_template(laid_out.lm, source))


class Feeder:
    """Scores in an actor that `FedLM` starts. Its methods are coroutines, which begin in the order of their calls."""

    def __init__(self, lm: LMConfig, source: LocalSource, cache: Path, places: Places) -> None:
        take_places(places)
        self._warnings = CollectedWarnings()
        logging.getLogger("replug").addHandler(self._warnings)
        self._template = prompt_template(lm, source)
        self._lm = CachingLM(source.open(lm), cache)

    async def sums(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> Answer:
        return await self._answer(self._lm.submit_examples(self._template, examples, texts))

    async def call(self, call: Call) -> Answer:
        return await self._answer(self._lm.submit_call(call))

    async def _answer(self, future: Future) -> Answer:
        result = await asyncio.wrap_future(future)
        metrics = {**self._lm.metrics(), "truncated": float(self._template.num_truncated)}
        return result, metrics, self._warnings.take()


class FedLM(AsyncLM):
    """A `CachingLM` over a pool of scorers, in another process of this node, which is restarted if it dies.

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

    def submit_examples(
        self, template: PromptTemplate, examples: Sequence[Example], texts: Sequence[Sequence[str]]
    ) -> "Future[np.ndarray]":
        """Let the feeder make the prompts, with its copy of the template."""
        return mapped(self._pool.submit("sums", examples, texts), lambda answer: self._note(answer).copy())

    def submit_call(self, call: Call) -> "Future[Any]":
        """Let the feeder split the call into scoring batches and answer it."""
        return mapped(self._pool.submit("call", call), self._note)

    def metrics(self) -> dict[str, float]:
        """Return the feeder's metrics at its last answer, with the texts that its template cut."""
        return self._metrics

    def close(self) -> None:
        """End the feeder, and with it the replicas that it owns."""
        self._pool.close()

    def _note(self, answer: Answer) -> Any:
        result, self._metrics, warnings = answer
        for warning in warnings.values():
            log.warning(warning)
        return result


def started_lm(lm: LMConfig, source: LMSource, scores: Path) -> AbstractContextManager[AsyncLM]:
    """Open the LM behind its cache, in a separate process for many replicas."""
    if isinstance(source, LocalSource) and scorer_actors()[0] > MOST_FED_HERE:
        return closing(FedLM(lm, source, scores))
    return opened_lm(lm, source, scores)


def local_models(config: Config) -> list[Path]:
    """Return the folders that scorers and trainer ranks load from; a name on the hub is not a folder."""
    retriever = located(config.retriever)
    documents = document_encoder(retriever.path)  # of tuned queries
    named = [retriever.path, retriever.query_path, documents and encoder_location(documents["path"])]
    named += [resolve_lm_path(config.lm.path)] if config.lm.path else []
    return [Path(name) for name in named if name and Path(name).is_dir()]
