"""How long searchers are waited for, what is said of those that do not answer, and a GPU that fails."""

import os
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayTaskError

from replug.cluster.gpus import USE, Busy
from replug.config.errors import RunError, UserError
from replug.index_workers import searcher_group
from replug.index_workers import searcher_group as liveness
from replug.index_workers.searcher_group import PING_GROUP, Liveness, SearcherGroup


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of these tests are never closed: a thread that watches them would be waited for by every later Ray."""
    monkeypatch.setattr(searcher_group, "start_ray_thread", lambda *_, **__: None)


def group(timeout_seconds: float) -> SearcherGroup:
    call = SimpleNamespace(remote=lambda *_: None)
    return SearcherGroup(lambda shard: SimpleNamespace(load=call, search_timed=call, release=call), 2, timeout_seconds)


def test_loading_has_the_time_of_the_configuration_and_is_named_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def never(references: list[Any], timeout: float) -> None:
        waited.append(timeout)
        raise GetTimeoutError

    monkeypatch.setattr(searcher_group.ray, "get", never)
    monkeypatch.setattr(searcher_group.ray, "put", lambda queries: queries)
    says = r"do not answer \(GetTimeoutError, after at most 7200 s\): is there room"
    for ask in (lambda of: of.load(1, 10), lambda of: of.search(1, None, 3), lambda of: of.release([1])):
        with pytest.raises(RunError, match=says):
            ask(group(7200.0))
    assert waited == [7200.0] * 3


# A GPU that fails ------------------------------------------------------------------------------------------------

ILLEGAL = torch.AcceleratorError(
    "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"
)


@dataclass
class Searcher:
    """Its calls say the shard; of its processes the first so many have a broken GPU."""

    shard: int
    broken: int = 0
    error: Exception = ILLEGAL
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *_: self.call(name))

    def call(self, name: str) -> object:
        self.asked.append(name)
        found = np.full((1, 1), self.shard), np.full((1, 1), -1.0 * self.shard, dtype=np.float32)
        answer = {"load": 5, "release": None, "search_timed": (found, Busy(1.5, (f"a:{self.shard}",)))}[name]
        return RayTaskError(name, "", self.error) if self.broken else answer


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shards whose actors were killed to be started again."""
    shards: list[int] = []

    def get(references: list[Any], timeout: float) -> list[Any]:
        for reference in references:
            if isinstance(reference, RayTaskError):
                raise reference
        return references

    def kill(actor: Searcher, no_restart: bool) -> None:
        assert not no_restart
        actor.broken -= 1
        shards.append(actor.shard)

    monkeypatch.setattr(searcher_group.ray, "get", get)
    monkeypatch.setattr(searcher_group.ray, "put", lambda queries: queries)
    monkeypatch.setattr(searcher_group.ray, "kill", kill)
    return shards


def test_a_searcher_whose_gpu_fails_is_started_anew_and_asked_again(killed: list[int]) -> None:
    actors = [Searcher(0), Searcher(1, broken=2)]
    USE.take()
    assert SearcherGroup(actors.__getitem__, 2, 60.0).search(3, np.zeros((1, 4)), 2)[0].tolist() == [[0, 1]]
    assert killed == [1, 1]
    assert (actors[0].asked, actors[1].asked) == (["search_timed"], ["search_timed"] * 3), "what others answered stays"
    assert USE.take() == {"a:0": {"search": 1.5}, "a:1": {"search": 1.5}}


def test_a_gpu_that_fails_again_and_again_ends_the_run_by_name(killed: list[int]) -> None:
    actors = [Searcher(0, broken=9), Searcher(1)]
    for ask in (lambda of: of.search(3, np.zeros((1, 4)), 2), lambda of: of.load(3, 10), lambda of: of.release([3])):
        with pytest.raises(RunError, match=r"^the GPU of an index searcher failed 3 times: CUDA error: an[^\n]*$"):
            ask(SearcherGroup(actors.__getitem__, 2, 60.0))
    assert killed == [0] * 6


@pytest.mark.parametrize("error", [UserError("a file is damaged"), ValueError("k"), torch.OutOfMemoryError("CUDA out")])
def test_any_other_error_is_raised_and_no_searcher_is_killed(killed: list[int], error: Exception) -> None:
    expected = UserError if isinstance(error, UserError) else RayTaskError
    with pytest.raises(expected):
        SearcherGroup([Searcher(0, 1, error), Searcher(1)].__getitem__, 2, 60.0).load(3, 10)
    assert killed == []


class Worker:
    def ping(self) -> None:
        pass

    def work(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


@pytest.mark.slow
def test_an_actor_that_hangs_is_replaced_and_one_that_works_long_is_not(ray_session, monkeypatch):
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 8.0)
    worker = ray.remote(concurrency_groups=dict(PING_GROUP))(Worker)
    actors = [worker.options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote() for _ in range(2)]
    hung, busy = (ray.get(actor.work.remote(0)) for actor in actors)
    looks = Liveness(actors)
    answers = [actors[0].work.remote(0.5), actors[1].work.remote(16)]
    while not looks._pings.get(0) or looks._pings[0][1] is None:
        assert looks.replace_silent() == []
        time.sleep(0.1)
    os.kill(hung, signal.SIGSTOP)
    replaced: list[int] = []
    while not replaced:
        time.sleep(0.2)
        replaced = looks.replace_silent()
    assert replaced == [0]
    _, second = ray.get(answers, timeout=300)
    assert second == busy
    for actor in actors:
        ray.kill(actor)
