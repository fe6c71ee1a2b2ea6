"""The index as one service: builders that embed new versions beside searchers that serve the live one.

A swap has two phases: `prepare` loads the new version on every searcher while searches go on, then the
caller begins to name that version in its searches. Every search names its version and reaches every shard, so
an answer never mixes versions and never comes from fewer shards than there are.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from data.progress import Progress, say
from data.records import SearchResult
from index_workers.builder import Builder
from index_workers.merge import merge_top_k
from index_workers.searcher import Searcher
from index_workers.version_store import BuildPlan, VersionStore
from models.actor_pool import ActorPool
from models.hardware import available_cores
from models.scorer_pool import thread_env

SEARCH_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class IndexSettings:
    """How many actors of which kind; the fields are those of the `index` section."""

    kind: str = "flat_fp16"
    num_shards: int = 1
    num_builders: int = 1
    threads: int | None = None
    gpus_per_builder: float = 0.0
    max_attempts: int = 3


class IndexService:
    """Builders and searchers over the versions under `root`."""

    def __init__(self, root: Path, settings: IndexSettings) -> None:
        self.store = VersionStore(root.absolute())
        self._threads = settings.threads or available_cores()
        self._settings = settings
        self.searchers = [self._make_searcher(shard) for shard in range(settings.num_shards)]
        self.builders = ActorPool(
            self._make_builder, settings.num_builders, "index builder", max_attempts=settings.max_attempts
        )

    def build(self, plan: BuildPlan, quiet: bool = False) -> "Future[None]":
        """Embed and publish a version in the background; blocks that are already marked are kept."""
        done: Future[None] = Future()
        missing = self.store.begin(plan)
        progress = None if quiet else Progress(f"embedding index v{plan.version}", plan.num_documents)
        blocks = [self.builders.submit("embed_block", plan, block) for block in missing]
        threading.Thread(
            target=self._publish_when_done, args=(plan, blocks, progress, done), daemon=True, name="index-build"
        ).start()
        return done

    def prepare(self, version: int) -> None:
        """Load a published version on every shard, beside the one that is served."""
        sizes: list[int] = ray.get([s.load.remote(version) for s in self.searchers], timeout=SEARCH_TIMEOUT_SECONDS)
        expected = self.store.plan(version).num_documents
        if sum(sizes) != expected:
            raise RuntimeError(f"index version {version}: shards hold {sum(sizes)} documents, expected {expected}")

    def search(self, version: int, queries: np.ndarray, k: int) -> SearchResult:
        """The k nearest documents to each query vector [B, D], in one version over every shard."""
        parts: list[tuple[np.ndarray, np.ndarray]] = ray.get(
            [s.search.remote(version, queries, k) for s in self.searchers], timeout=SEARCH_TIMEOUT_SECONDS
        )
        rows, similarities = merge_top_k(parts, k)
        return SearchResult(rows, similarities, version)

    def release_all_but(self, versions: list[int]) -> None:
        """Free the memory of versions that are searched no more."""
        ray.get([s.release.remote(versions) for s in self.searchers], timeout=SEARCH_TIMEOUT_SECONDS)

    def close(self) -> None:
        self.builders.close()
        for searcher in self.searchers:
            ray.kill(searcher)

    def _publish_when_done(
        self, plan: BuildPlan, blocks: "list[Future[int]]", progress: Progress | None, done: "Future[None]"
    ) -> None:
        try:
            for block in blocks:
                count = block.result()
                if progress is not None:
                    progress.advance(count)
            self.store.publish(plan)
        except Exception as error:  # noqa: BLE001 - whatever stopped the build is the caller's to see, by the future
            say(f"building index v{plan.version} failed: {error}")
            done.set_exception(error)
        else:
            done.set_result(None)

    def _make_searcher(self, shard: int) -> Any:
        actor = ray.remote(Searcher).options(
            num_cpus=1,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=4,  # searches go on while a version is loaded
            runtime_env=thread_env(self._threads),
        )
        return actor.remote(self.store.root, self._settings.kind, shard, self._settings.num_shards, self._threads)

    def _make_builder(self, number: int) -> Any:
        actor = ray.remote(Builder).options(
            num_cpus=1, num_gpus=self._settings.gpus_per_builder, runtime_env=thread_env(self._threads)
        )
        return actor.remote(self.store.root, self._threads)
