"""The index as one service: builders that embed new versions beside searchers that serve the live one.

A swap has two phases. `refresh` embeds, publishes and loads the new version on every searcher while searches go on;
then the caller begins to name that version in its searches, and `commit` frees the one before. Every search names its
version and reaches every shard, so an answer never mixes versions.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError

from replug.cluster.actor_pool import ActorPool, thread_env
from replug.cluster.background import in_background
from replug.cluster.gpus import USE, Busy, torch_device
from replug.cluster.layout import index_actors
from replug.cluster.packing import BUILDER, SEARCHER
from replug.cluster.places import place
from replug.config.choices import SwapMode
from replug.config.errors import RunError, UserError
from replug.config.schema import IndexConfig
from replug.data.progress import Progress
from replug.data.records import SearchResult
from replug.data.store import CorpusStore, open_corpus
from replug.index_workers.answers import Measures, merge_top_k, search_excluding, top_k_overlap
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder
from replug.index_workers.searcher import Searcher
from replug.index_workers.searcher_group import PING_GROUP, SearcherGroup
from replug.index_workers.version_store import Missing, VersionStore
from replug.models.hardware import available_cores

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TIMEOUT_SECONDS = 3600.0  # of a file of vectors, a step of a lossy kind's build, loading a version
BUILDER_CALLS = 2  # of one builder at once: while one file is computed, the next is read and the last written

# What a dropped version and a search took goes back to the system, whichever thread it was of: else the C library
# keeps a heap for each thread, and memory grows with the swaps.
RETURN_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


@dataclass(frozen=True, slots=True)
class Refreshed:
    """A version that is loaded on every shard; how it was made, and how it differs from the one before."""

    measures: Measures
    build_seconds: float
    documents_per_second: float


class IndexService:
    """Builders and searchers over the versions under `root`, as the section `index` says.

    A file, one step of a lossy kind's build, and loading a version are each tried `max_attempts` times. The first
    `watched_k` documents of `watched_texts` measure every refresh. With `index.swap=blue_green` new actors, which take
    the builders' place in the cluster, search a new version; else the same searchers hold two versions during a swap.
    """

    def __init__(self, root: Path, index: IndexConfig, watched_texts: Sequence[str] = (), watched_k: int = 20) -> None:
        self.store = VersionStore(root.absolute())
        self._index, self._actors = index, index_actors(index)
        self._watched_texts, self._watched_k = watched_texts, watched_k
        self._threads = available_cores()
        self._builders: ActorPool | None = None
        self._corpus: CorpusStore | None = None  # one for all versions
        self._groups: dict[int, SearcherGroup] = {}  # by version
        self._builders_at, self._searchers_at = BUILDER, SEARCHER  # whose places they take; blue_green changes them
        self._shared = None if index.swap is SwapMode.blue_green else self._make_group()
        self.builders  # noqa: B018 - starts them, so that they are there when they are needed

    @property
    def builders(self) -> ActorPool:
        """Return the builders, started if they are not there."""
        if self._builders is None:
            self._builders = ActorPool(
                self._make_builder,
                self._actors.num_builders,
                "index builder",
                max_in_flight=BUILDER_CALLS,
                max_attempts=self._index.max_attempts,
                timeout_seconds=TIMEOUT_SECONDS,
            )
        return self._builders

    @property
    def searchers(self) -> list[Any]:
        """Return every searcher actor, for tests that kill them."""
        return [actor for group in {*self._groups.values(), *filter(None, [self._shared])} for actor in group.actors]

    def build(self, plan: BuildPlan) -> "Future[float]":
        """Embed and publish a version in the background; what is already marked is kept.

        Its result is the documents embedded a second.
        """
        missing = self.store.begin(plan)  # now: a checkpoint may name this version as soon as this returns
        return _build_in_background(lambda: self._build(plan, missing))

    def refresh(self, plan: BuildPlan, previous: int) -> "Future[Refreshed]":
        """Build a version and load it on every shard, beside the previous one, in the background."""
        missing = self.store.begin(plan)
        return _build_in_background(lambda: self._refresh(plan, missing, previous))

    def prepare(self, version: int) -> None:
        """Load a published version on every shard, beside the one that is served."""
        if version not in self._groups:
            self._groups[version] = self._shared or self._make_green()
        self._groups[version].load(version, self.store.plan(version).num_documents)

    def search(
        self,
        version: int,
        queries: np.ndarray,
        k: int,
        exclude: Sequence[str | None] | None = None,
    ) -> SearchResult:
        """Return the k nearest documents to each query vector [B, D], in one version over every shard.

        `exclude` names a source for each query whose documents it must not get. Raises UserError where that leaves
        fewer than k, or a version is not published or damaged, RunError where the searchers do not answer.
        """
        if version not in self._groups:
            self.prepare(version)
        group = self._groups[version]
        if exclude is None:
            return SearchResult(*group.search(version, queries, k), version)
        if self._corpus is None:
            self._corpus = open_corpus(self.store.corpus_path(self.store.plan(version)))
        search = partial(group.search, version)
        try:
            found = search_excluding(search, self._corpus.sources, queries, k, exclude, k)
        except ValueError as error:
            raise UserError(f"retrieve.exclude_own_source: {error}; ask for fewer by retrieve.k") from error
        return SearchResult(*found, version)

    def commit(self, version: int) -> None:
        """Free the memory of all other versions; searches of theirs that are under way are answered first."""
        for other in [other for other in list(self._groups) if other != version]:
            group = self._groups.pop(other)
            if group is not self._groups.get(version):
                group.retire()
        self._groups[version].release([version])

    def prune(self, keep: set[int]) -> None:
        """Set aside versions that nothing needs. Their files are removed in the background.

        What cannot be removed is said, and tried again with the next; `store.remove_all_but` raises it at the end.
        """
        self.store.set_aside_all_but(keep)
        in_background(self._remove_stale, "index-prune")

    def close(self) -> None:
        if self._builders is not None:
            self._builders.close()
        for group in {*self._groups.values(), *filter(None, [self._shared])}:
            group.close()

    def _refresh(self, plan: BuildPlan, missing: Missing, previous: int) -> Refreshed:
        start = time.monotonic()
        rate = self._build(plan, missing)
        seconds = time.monotonic() - start
        ask = self._questions(plan, previous)
        for _ in range(self._index.max_attempts - 1):
            try:
                return Refreshed(self._load(plan.version, previous, ask), seconds, rate)
            except (RunError, RayError) as error:  # not what is wrong with a file: that stays
                log.warning(f"index v{plan.version} is built and could not be loaded; trying again: {error}")
        return Refreshed(self._load(plan.version, previous, ask), seconds, rate)

    def _load(self, version: int, previous: int, ask: Callable[[], Measures]) -> Measures:
        """Load a published version and ask the searchers; where that fails, no searcher answers for it."""
        try:
            self.prepare(version)
            return ask()
        except Exception:
            if version != previous:
                # What some searchers have loaded must not answer for the next version, which has the same number
                group = self._groups.pop(version, None)
                if group is not None and group is self._shared:
                    with suppress(RunError):  # who does not answer now compares what it holds when it loads the next
                        group.release(list(self._groups))
                elif group is not None:
                    group.close()
            raise

    def _build(self, plan: BuildPlan, missing: Missing) -> float:
        self._remove_stale()  # first: the disk may need the room
        start = time.monotonic()
        documents = self._embed(plan, missing.files)
        seconds = time.monotonic() - start
        # The files of a lossy kind
        if missing.quantizer:
            self.builders.submit("make_quantizer", plan).result()
        shards = [self.builders.submit("build_shard", plan, shard) for shard in missing.shards]
        wait(shards)
        for shard in shards:
            shard.result()
        self.store.publish(plan)
        return documents / seconds if seconds else 0.0

    def _remove_stale(self) -> None:
        try:
            self.store.remove_stale()
        except RunError as error:
            log.warning(f"{error}; trying again with the next versions that are removed")

    def _embed(self, plan: BuildPlan, files: list[int]) -> int:
        """Hand out files, a few ahead of what is done; returns the number of documents.

        After an error what is under way is waited for: it must not write once the version is begun anew.
        """
        total = sum(len(plan.rows_of_file(file)) for file in files)
        progress = Progress(f"embedding index v{plan.version}", total, work=("documents", 1))
        under_way: deque[tuple[int, Future[Busy]]] = deque()

        def await_first() -> None:
            file, done = under_way[0]
            busy = done.result()
            USE.note("embed", busy)
            progress.advance(len(plan.rows_of_file(file)), seconds=busy.seconds / self._actors.num_builders)
            under_way.popleft()

        try:
            for file in files:
                under_way.append((file, self.builders.submit("embed_file", plan, file)))
                if len(under_way) > 2 * BUILDER_CALLS * self._actors.num_builders:
                    await_first()
            while under_way:
                await_first()
        finally:
            wait([done for _, done in under_way])
        return total

    def _questions(self, plan: BuildPlan, previous: int) -> Callable[[], Measures]:
        """Ask the builders what a refresh is measured by; the function that is returned asks the searchers.

        In two parts, since with blue_green there are no builders when the searchers are there.
        """
        texts, k = self._watched_texts, min(self._watched_k, plan.num_documents)
        if not texts or plan.kind.store:
            return Measures
        queries = self.builders.submit("encode", plan, texts).result()
        drift = self.builders.submit("drift", self.store.plan(previous), plan).result()
        exact = None
        if not plan.kind.is_exact:  # by the float16 vectors, each builder a part of them
            parts = self._actors.num_builders
            found = [self.builders.submit("search_exactly", plan, part, parts, queries, k) for part in range(parts)]
            exact, _ = merge_top_k([part.result() for part in found], k)

        def ask() -> Measures:
            rows = self.search(plan.version, queries, k).doc_rows
            before = self.search(previous, queries, k).doc_rows
            return Measures(1.0 if exact is None else top_k_overlap(exact, rows), top_k_overlap(before, rows), drift)

        return ask

    def _make_green(self) -> SearcherGroup:
        """Searchers of one version, where the builders were; these come back for the next build, on the other side."""
        if self._builders is not None:
            self._builders.close()
            self._builders = None
        if self._actors.gpus_per_searcher:
            self._builders_at, self._searchers_at = self._searchers_at, self._builders_at
        return self._make_group()

    def _make_group(self) -> SearcherGroup:
        return SearcherGroup(self._make_searcher, self._actors.num_shards, TIMEOUT_SECONDS)

    def _make_searcher(self, shard: int) -> Any:
        gpus, env = self._actors.gpus_per_searcher, {**thread_env(self._threads)["env_vars"], **RETURN_MEMORY}
        actor = ray.remote(concurrency_groups=dict(PING_GROUP))(Searcher).options(  # type: ignore[call-overload] # as documented
            **place(self._searchers_at, shard, gpus, env),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=8,  # searches go on while a version is loaded
        )
        device = torch_device(wants_gpu=gpus > 0)
        return actor.remote(self.store.root, shard, self._actors.num_shards, self._threads, device)

    def _make_builder(self, number: int) -> Any:
        env = thread_env(self._threads)["env_vars"]
        actor = ray.remote(Builder).options(
            **place(self._builders_at, number, self._actors.gpus_per_builder, env), max_concurrency=BUILDER_CALLS
        )
        return actor.remote(self.store.root, self._threads)


def _build_in_background(work: Callable[[], Result]) -> "Future[Result]":
    def warn(done: Future) -> None:
        if error := done.exception():
            log.warning(f"building the index failed: {error}")

    done = in_background(work, "index-build")
    done.add_done_callback(warn)
    return done
