"""One searcher actor for each shard, asked together: an answer comes from all of them or not at all.

An actor that hangs answers no `ping` beside its work; Ray itself waits for a process that is stopped. Only an actor
that answered before counts as silent: one that waits for room, or imports, does not yet.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from replug.cluster.actor_pool import is_device_fault
from replug.cluster.background import start_ray_thread
from replug.cluster.gpus import USE
from replug.config.errors import RunError, UserError
from replug.index_workers.answers import merge_top_k

log = logging.getLogger(__name__)

MAX_FAULTS = 3  # times in a row that a GPU may fail: another process has another context, but perhaps the same GPU
SILENT_SECONDS = 120.0  # as of a trainer rank: a loaded machine delays an answer by seconds
LOOK_SECONDS = 2.0  # between two looks
PING_GROUP = {"ping": 1}  # a thread of the actor for this method alone


class Liveness:
    """Finds actors that hang. Their class has a method `ping`, and their options hold PING_GROUP. For one thread."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        # By place the ping that was sent, and when the actor last answered one, by this machine's clock
        self._pings: dict[int, tuple[Any, float | None]] = {}

    def replace_silent(self) -> list[int]:
        """Replace actors that hang; Ray starts them and their calls again. Returns their places."""
        silent = [place for place in range(len(self._actors)) if self._silent_seconds(place) > SILENT_SECONDS]
        for place in silent:
            del self._pings[place]
            ray.kill(self._actors[place], no_restart=False)
        return silent

    def _silent_seconds(self, place: int) -> float:
        now = time.monotonic()
        if place not in self._pings:
            self._pings[place] = self._ping(place), None
        ping, heard = self._pings[place]
        if ray.wait([ping], timeout=0)[0]:
            try:
                ray.get(ping)
                heard = now
            except RayError:  # the actor has died: it is being started again, and has not answered since
                heard = None
            self._pings[place] = self._ping(place), heard
        return 0.0 if heard is None else now - heard

    def _ping(self, place: int) -> Any:
        return self._actors[place].ping.options(concurrency_group="ping", max_task_retries=0).remote()


class SearcherGroup:
    """`make_actor(shard)` gives the actor of each shard; Ray restarts one that dies and asks it again.

    It then loads its shard before it answers, so every answer has the time that loading has. One that hangs is replaced
    as one that died, and so is one whose GPU fails: every later call in that process would fail too.
    """

    def __init__(self, make_actor: Callable[[int], Any], num_shards: int, timeout_seconds: float) -> None:
        self.actors = [make_actor(shard) for shard in range(num_shards)]
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._in_flight = 0
        self._closed = threading.Event()
        start_ray_thread(self._watch, name="searchers")

    def load(self, version: int, num_documents: int) -> None:
        """Load a published version on every shard, beside those already there."""
        sizes: list[int] = self._ask(lambda actor: actor.load.remote(version))
        if sum(sizes) != num_documents:
            raise RunError(f"index version {version}: shards hold {sum(sizes)} documents, expected {num_documents}")

    def search(self, version: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and similarities [B, k], best first, merged from every shard."""
        shipped = ray.put(queries)  # once: an array among the arguments is copied for every shard
        parts = self._ask(lambda actor: actor.search_timed.remote(version, shipped, k))
        for _, busy in parts:
            USE.note("search", busy)
        return merge_top_k([results for results, _ in parts], k)

    def release(self, keep: list[int]) -> None:
        """Free the memory of the other versions."""
        self._ask(lambda actor: actor.release.remote(keep))

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

    def _ask(self, call: Callable[[Any], Any]) -> list[Any]:
        """Return every answer. Raises what an actor says without Ray's traceback round it."""
        with self._flight():
            references = [call(actor) for actor in self.actors]
            for faults in range(1, MAX_FAULTS + 1):
                try:
                    return self._answers(references)
                except RayTaskError as error:
                    if not is_device_fault(error.cause):
                        raise (error.cause if isinstance(error.cause, UserError | RunError) else error) from None
                    fault = str(error.cause).strip().splitlines()[0]  # CUDA puts advice behind what happened
                if faults < MAX_FAULTS:
                    log.warning(f"the GPU of an index searcher failed ({fault}); starting it anew")
                    references = [self._again(*pair, call) for pair in zip(self.actors, references, strict=True)]
        raise RunError(f"the GPU of an index searcher failed {MAX_FAULTS} times: {fault}")

    def _answers(self, references: list[Any]) -> list[Any]:
        try:
            return ray.get(references, timeout=self._timeout)
        except (GetTimeoutError, RayActorError) as error:
            raise RunError(
                f"the index's searchers do not answer ({type(error).__name__}, after at most {self._timeout:g} s): "
                "is there room in the cluster for index.num_shards of them?"
            ) from error

    def _again(self, actor: Any, reference: Any, call: Callable[[Any], Any]) -> Any:
        """The same call, of a new process where the GPU of this one failed; Ray asks it again what others asked."""
        try:
            self._answers([reference])
        except RayTaskError as error:
            if is_device_fault(error.cause):
                ray.kill(actor, no_restart=False)
                return call(actor)
        return reference

    def _watch(self) -> None:
        """While somebody waits for the searchers, replace those that hang."""
        liveness = Liveness(self.actors)
        while not self._closed.wait(LOOK_SECONDS):
            for shard in liveness.replace_silent() if self._in_flight else []:
                log.warning(f"the searcher of shard {shard} gives no sign of life; starting it again")
