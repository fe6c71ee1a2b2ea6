"""The index as one service: builders that embed new versions beside searchers that serve the live one.

A swap has two phases. `refresh` embeds, publishes and loads the new version on every searcher while searches continue;
then the caller names that version in its searches, and `commit` frees the previous one. Every search names its
version and reaches every shard, so a result never mixes versions.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.cluster.background import in_background
from replug.cluster.layout import BUILDER, SEARCHER, IndexActors
from replug.cluster.places import index_actors, place
from replug.config.errors import RunError, UserError
from replug.data.progress import Progress
from replug.data.records import SearchResult
from replug.data.store import CorpusStore
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder
from replug.index_workers.exact_search import merge_top_k, search_excluding, top_k_overlap
from replug.index_workers.searcher import Searcher
from replug.index_workers.version_store import Missing, VersionStore
from replug.models.hardware import available_cores

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 3600.0  # of a file of vectors, a step of a lossy kind's build, loading a version
SEARCHER_CALLS, SEARCH_ATTEMPTS = 8, 10  # of one searcher at once: searches continue while a version is loaded
BUILDER_CALLS = 2  # of one builder at once: while one file is computed, the next is read and the last written

# Returns the memory of dropped versions and finished searches to the system: by default the C library keeps a heap for
# each thread, and memory grows with the swaps.
RETURN_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


class SearcherGroup:
    """One searcher actor for each shard, called together: a result comes from all of them or not at all.

    `make_actor(shard)` starts the actor of a shard. A pool of one replaces an actor that dies or loses its GPU, and
    repeats the call. The new actor loads its shard first, so every call has the time-out of loading.
    """

    def __init__(self, make_actor: Callable[[int], Any], num_shards: int, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._pools = [
            ActorPool(
                lambda _, shard=shard: make_actor(shard),  # type: ignore[misc]
                size=1,
                name=f"index.num_shards: searcher {shard}, replica",
                max_in_flight=SEARCHER_CALLS,
                max_attempts=SEARCH_ATTEMPTS,
                timeout_seconds=timeout_seconds,
                start_timeout_seconds=timeout_seconds,
            )
            for shard in range(num_shards)
        ]

    @property
    def actors(self) -> list[Any]:
        return [actor for pool in self._pools for actor in pool.handles()]

    def load(self, version: int, num_documents: int) -> None:
        """Load a published version on every shard, beside the loaded ones."""
        total = sum(self._ask("load", version))
        if total != num_documents:
            raise RunError(f"index version {version}: shards hold {total} documents, expected {num_documents}")

    def search(self, version: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and similarities [B, k], best first, merged from every shard."""
        shipped = ray.put(queries)  # once: as an argument the array would be copied for every shard
        actors, answers = self.actors, []
        asked = [actor.search.remote(version, shipped, k) for actor in actors]
        try:  # one wait for all shards: a thread for each would triple rank 0's time
            answers = ray.get(asked, timeout=self._timeout_seconds)
        except GetTimeoutError:  # kill hanging actors: the pools would wait as long again for them
            hanging = ray.wait(asked, num_returns=len(asked), timeout=0)[1]
            for actor, answer in zip(actors, asked, strict=True):
                if answer in hanging:
                    ray.kill(actor)
        except RayError:  # the pools replace dead actors, and report other errors
            pass
        return merge_top_k(answers if len(answers) == len(self._pools) else self._ask("search", version, shipped, k), k)

    def release(self, keep: list[int]) -> None:
        """Free the memory of the other versions."""
        self._ask("release", keep)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        answers = [pool.submit(method, *arguments) for pool in self._pools]
        return [answer.result() for answer in answers]


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Shares of documents that a version shares with exact search and with the version before, and its build's time."""

    recall: float = 1.0
    overlap: float = 1.0
    build_seconds: float = 0.0


class IndexService:
    """Builders and searchers over the versions under `root`. The searchers hold two versions during a swap.

    `actors` default to the layout. Their pools repeat the calls of a dead actor. The first `watched_k` documents of
    `watched_texts` measure every refresh.
    """

    def __init__(
        self, root: Path, watched_texts: Sequence[str] = (), watched_k: int = 20, actors: IndexActors | None = None
    ) -> None:
        self.store = VersionStore(root.absolute())
        self._actors = actors or index_actors()
        self._watched_texts, self._watched_k = watched_texts, watched_k
        self._threads = available_cores()
        self._corpus: CorpusStore | None = None  # one for all versions
        self._loaded: set[int] = set()  # versions that every searcher holds, or loads
        self.searchers = SearcherGroup(self._make_searcher, self._actors.num_shards, TIMEOUT_SECONDS)
        self.builders = ActorPool(
            self._make_builder,
            self._actors.num_builders,
            "index builder",
            max_in_flight=BUILDER_CALLS,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def build(self, plan: BuildPlan) -> "Future[None]":
        """Embed and publish a version in the background; marked files are kept."""
        missing = self.store.begin(plan)  # now: a checkpoint may name this version as soon as this returns
        return in_background(lambda: self._build(plan, missing), "index-build")

    def refresh(self, plan: BuildPlan, previous: int) -> "Future[Refreshed]":
        """Build a version and load it on every shard, beside the previous one, in the background."""
        missing = self.store.begin(plan)
        return in_background(lambda: self._refresh(plan, missing, previous), "index-build")

    def prepare(self, version: int) -> None:
        """Load a published version on every shard, beside the version in use."""
        self._loaded.add(version)
        self.searchers.load(version, self.store.plan(version).num_documents)

    def search(
        self,
        version: int,
        queries: np.ndarray,
        k: int,
        exclude: Sequence[str | None] | None = None,
    ) -> SearchResult:
        """Return the k nearest documents to each query vector [B, D], in one version over every shard.

        `exclude` names for each query a source to leave out. Raises UserError if that leaves fewer than k documents, or
        the version is unpublished or damaged; RunError if the searchers do not answer.
        """
        if version not in self._loaded:
            self.prepare(version)
        search = partial(self.searchers.search, version)
        if exclude is None:
            return SearchResult(*search(queries, k), version)
        if self._corpus is None:
            self._corpus = self.store.open_corpus(self.store.plan(version))
        try:
            results = search_excluding(search, self._corpus.sources, queries, k, exclude, k)
        except ValueError as error:
            raise UserError(f"retrieve.exclude_own_source: {error}; ask for fewer by retrieve.k") from error
        return SearchResult(*results, version)

    def commit(self, version: int) -> None:
        """Free the memory of all other versions; their searches under way finish first."""
        self._loaded &= {version}
        self.searchers.release([version])

    def prune(self, keep: set[int]) -> None:
        """Set aside all versions but `keep`, and remove their files in the background.

        A failed removal is logged and repeated with the next one; `store.remove_all_but` raises it at the end.
        """
        self.store.set_aside_all_but(keep)
        in_background(self._remove_stale, "index-prune")

    def close(self) -> None:
        self.builders.close()
        self.searchers.close()

    def _refresh(self, plan: BuildPlan, missing: Missing, previous: int) -> Refreshed:
        start = time.monotonic()
        self._build(plan, missing)
        seconds = time.monotonic() - start
        try:
            self.prepare(plan.version)
            return Refreshed(*self._measures(plan, previous), seconds)
        except Exception:  # no searcher may answer for it
            if plan.version != previous:  # a rebuilt version has the same number, and may differ
                self._loaded.discard(plan.version)
                with suppress(RunError):  # a silent searcher compares fingerprints at its next load
                    self.searchers.release(list(self._loaded))
            raise

    def _build(self, plan: BuildPlan, missing: Missing) -> None:
        self._remove_stale()  # first: the disk may need the room
        files, needs_quantizer, missing_shards = missing
        self._embed(plan, files)
        if needs_quantizer:
            self.builders.submit("make_quantizer", plan).result()
        shards = [self.builders.submit("build_shard", plan, shard) for shard in missing_shards]
        wait(shards)
        for shard in shards:
            shard.result()
        self.store.publish(plan)

    def _remove_stale(self) -> None:
        try:
            self.store.remove_stale()
        except RunError as error:
            log.warning(f"{error}; trying again at the next removal")

    def _embed(self, plan: BuildPlan, files: list[int]) -> None:
        """Have the builders embed files.

        After an error it waits for running calls, which must not write into a restarted build of the version.
        """
        total = sum(len(plan.rows_of_file(file)) for file in files)
        progress = Progress(f"embedding index v{plan.version}", total, work=("documents", 1))
        calls: list[Future[float]] = [self.builders.submit("embed_file", plan, file) for file in files]
        try:
            for file, call in zip(files, calls, strict=True):
                call.result()
                progress.advance(len(plan.rows_of_file(file)))
        finally:
            wait([call for call in calls if not call.cancel()])

    def _measures(self, plan: BuildPlan, previous: int) -> tuple[float, float]:
        """Return recall and overlap of a loaded version, by the watched texts."""
        texts, k = self._watched_texts, min(self._watched_k, plan.num_documents)
        if not texts or plan.kind.store:
            return 1.0, 1.0
        queries = self.builders.submit("encode", plan, texts).result()
        rows = self.search(plan.version, queries, k).doc_rows
        before = self.search(previous, queries, k).doc_rows
        recall = 1.0
        if not plan.kind.is_exact:  # by the float16 vectors, each builder a part of them
            parts = self._actors.num_builders
            answers = [self.builders.submit("search_exactly", plan, part, parts, queries, k) for part in range(parts)]
            recall = top_k_overlap(merge_top_k([answer.result() for answer in answers], k)[0], rows)
        return recall, top_k_overlap(before, rows)

    def _make_searcher(self, shard: int) -> Any:
        env = {**thread_env(self._threads)["env_vars"], **RETURN_MEMORY}
        actor = ray.remote(Searcher).options(**place(SEARCHER, shard, env), max_concurrency=SEARCHER_CALLS)
        device = "cuda" if self._actors.search_on_gpu else "cpu"
        return actor.remote(self.store.root, shard, self._actors.num_shards, self._threads, device)

    def _make_builder(self, number: int) -> Any:
        env = thread_env(self._threads)["env_vars"]
        actor = ray.remote(Builder).options(**place(BUILDER, number, env), max_concurrency=BUILDER_CALLS)
        return actor.remote(self.store.root, self._threads)
