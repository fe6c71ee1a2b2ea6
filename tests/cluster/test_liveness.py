"""An actor that is stopped is found by its silence and started again; who waits for it gets its answer."""

import os
import signal
import time

import pytest
import ray

from replug.index_workers import searcher_group as liveness
from replug.index_workers.searcher_group import PING_GROUP, Liveness


class Worker:
    def ping(self) -> None:
        pass

    def work(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


@pytest.mark.timeout(180)
def test_an_actor_that_hangs_is_replaced_and_one_that_works_long_is_not(ray_session, monkeypatch):
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 4.0)
    worker = ray.remote(concurrency_groups=dict(PING_GROUP))(Worker)
    actors = [worker.options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote() for _ in range(2)]
    hung, busy = (ray.get(actor.work.remote(0)) for actor in actors)
    looks = Liveness(actors)
    answers = [actors[0].work.remote(0.5), actors[1].work.remote(8)]
    while not looks._asked.get(0) or looks._asked[0].heard is None:
        assert looks.replace_silent() == []
        time.sleep(0.1)
    os.kill(hung, signal.SIGSTOP)
    replaced: list[int] = []
    while not replaced:
        time.sleep(0.2)
        replaced = looks.replace_silent()
    assert replaced == [0]
    _, second = ray.get(answers, timeout=120)
    assert second == busy
    for actor in actors:
        ray.kill(actor)
