"""One searcher actor for each shard, asked together: an answer comes from all of them or not at all."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from replug.cluster.liveness import LOOK_SECONDS, Liveness
from replug.configs.errors import RunError, UserError
from replug.index_workers.merge import merge_top_k

log = logging.getLogger(__name__)


class SearcherGroup:
    """`make_actor(shard)` gives the actor of each shard; Ray restarts one that dies and asks it again.

    It then loads its shard before it answers, so every answer has the time that loading has. One that hangs is replaced
    as one that died.
    """

    def __init__(self, make_actor: Callable[[int], Any], num_shards: int, timeout_seconds: float) -> None:
        self.actors = [make_actor(shard) for shard in range(num_shards)]
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._in_flight, self._is_retired = 0, False
        self._num_waiting, self._closed = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="searchers").start()

    def load(self, version: int, num_documents: int) -> None:
        """Load a published version on every shard, beside those already there."""
        sizes: list[int] = self._ask([actor.load.remote(version) for actor in self.actors])
        if sum(sizes) != num_documents:
            raise RunError(f"index version {version}: shards hold {sum(sizes)} documents, expected {num_documents}")

    def search(self, version: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and similarities [B, k], best first, merged from every shard."""
        with self._flight():
            parts = self._ask([actor.search.remote(version, queries, k) for actor in self.actors])
        return merge_top_k(parts, k)

    def release(self, keep: list[int]) -> None:
        """Free the memory of the other versions."""
        self._ask([actor.release.remote(keep) for actor in self.actors])

    def retire(self) -> None:
        """End the actors once the searches under way are answered."""
        with self._lock:
            self._is_retired = True
            if not self._in_flight:
                self.close()

    def close(self) -> None:
        self._closed.set()
        for actor in self.actors:
            ray.kill(actor)

    @contextmanager
    def _flight(self) -> Iterator[None]:
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
                if self._is_retired and not self._in_flight:
                    self.close()

    def _ask(self, references: list[Any]) -> list[Any]:
        """Every answer; raises what an actor says without Ray's traceback round it."""
        try:
            with self._watched():
                return ray.get(references, timeout=self._timeout)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError | RunError) else error) from None
        except (GetTimeoutError, RayActorError) as error:
            raise RunError(
                f"the index's searchers do not answer ({type(error).__name__}, after at most {self._timeout:g} s, "
                "index.timeout_seconds): is there room in the cluster for index.num_shards of them?"
            ) from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._lock:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _watch(self) -> None:
        """While somebody waits for the searchers, replace those that hang."""
        liveness = Liveness(self.actors)
        while not self._closed.wait(LOOK_SECONDS):
            for shard in liveness.replace_silent() if self._num_waiting else []:
                log.warning(f"the searcher of shard {shard} gives no sign of life; starting it again")
