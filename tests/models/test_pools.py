"""The actor pool and the scorer pool, on real Ray with real kill -9."""

import os
import signal
import sys
import time

import psutil
import pytest
import ray

from models.actor_pool import ActorPool, ActorPoolError
from models.scorer_pool import LMSpec, ScorerPool
from models.stand_in_lm import StandInLM

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(120)]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests


class Worker:
    """Sleeps, then answers; can fail or hang on request."""

    def square(self, x: int, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return x * x

    def fail(self) -> None:
        raise ValueError("no such document: doc-7")

    def process(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def make_pool(size: int, **options: float) -> ActorPool:
    return ActorPool(lambda number: ray.remote(Worker).options(num_cpus=0).remote(), size, "worker", **options)


def test_results_come_back_to_whoever_asked():
    pool = make_pool(2)
    futures = [pool.submit("square", x, 0.01) for x in range(20)]
    assert [future.result(30) for future in futures] == [x * x for x in range(20)]
    pool.close()


def test_killed_replicas_lose_no_work():
    pool = make_pool(2)
    futures = [pool.submit("square", x, 0.05) for x in range(40)]
    for _ in range(3):
        pid = ray.get(pool.handles()[0].process.remote(), timeout=30)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
    assert [future.result(60) for future in futures] == [x * x for x in range(40)]
    assert pool.num_respawns >= 1
    pool.close()


def test_an_error_of_the_work_itself_reaches_the_caller_and_is_not_retried():
    pool = make_pool(1)
    with pytest.raises(ValueError, match="doc-7"):
        pool.submit("fail").result(30)
    assert pool.num_respawns == 0
    assert pool.submit("square", 3).result(30) == 9
    pool.close()


def test_work_that_always_kills_its_worker_ends_in_an_error():
    pool = make_pool(1, max_attempts=2)
    with pytest.raises(ActorPoolError, match="die failed 2 times"):
        pool.submit("die").result(60)
    assert pool.submit("square", 3).result(30) == 9
    pool.close()


def test_a_hanging_call_is_done_again_by_a_new_replica():
    pool = make_pool(1, timeout_seconds=1.0, max_attempts=2)
    with pytest.raises(ActorPoolError, match="no answer within 1 s"):
        pool.submit("square", 3, 60.0).result(60)
    assert pool.num_respawns == 2
    pool.close()


def test_closing_ends_what_is_open_with_an_error():
    pool = make_pool(1)
    future = pool.submit("square", 3, 30.0)
    pool.close()
    with pytest.raises(ActorPoolError, match="closed"):
        future.result(10)


def test_the_scorer_pool_answers_as_the_lm_itself():
    pool = ScorerPool(LMSpec("stand_in"), num_replicas=2, threads=1)
    prefixes, continuations = ["a b c", "c d"], [" a b", " e"]
    expected = StandInLM().score(prefixes, continuations)
    scores = pool.score(prefixes, continuations)
    assert [s.token_logprobs.tolist() for s in scores] == [s.token_logprobs.tolist() for s in expected]
    assert pool.generate(["a b b"], 2) == ["b b"]
    assert pool.identity == StandInLM.identity
    pool.close()


def test_ray_listens_on_loopback_only():
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    ours = {p.pid for p in psutil.Process().children(recursive=True)}
    addresses = {c.laddr.ip.removeprefix("::ffff:") for c in listening if c.pid in ours}
    assert addresses and addresses <= {"127.0.0.1", "::1"}
