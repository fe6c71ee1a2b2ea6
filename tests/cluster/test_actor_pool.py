"""How the pool's dispatcher ends what cannot go on, on actors that are no processes. On real Ray: `test_pools.py`."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from replug.cluster import actor_pool
from replug.cluster.actor_pool import MAX_FAILED_STARTS, ActorPool, ActorPoolError, thread_env
from replug.cluster.layout import SCORER
from replug.cluster.places import place
from replug.config.errors import UserError
from replug.models.hardware import available_cores

SOON = 1  # seconds: far more than any of this takes


def method(answer: Any) -> SimpleNamespace:
    """A method of a handle, which answers at once with a value, an error or a function's result; with None it hangs."""

    def remote(*args: Any) -> SimpleNamespace:
        asked: Future = Future()
        if isinstance(answer, Exception):
            asked.set_exception(answer)
        elif answer is not None:
            asked.set_result(answer(*args) if callable(answer) else answer)
        return SimpleNamespace(future=lambda: asked)

    return SimpleNamespace(remote=remote)


def actor(**answers: Any) -> SimpleNamespace:
    """A handle; methods of which nothing is said hang."""
    answers = {"__ray_ready__": True, "probe": None, "square": None, **answers}
    return SimpleNamespace(**{name: method(answer) for name, answer in answers.items()})


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("score", f"Traceback of {cause!r}", cause, "worker", 1, "127.0.0.1")


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch):
    """`make_pool(make_actor, size, ...)`; pools are closed after the test."""
    monkeypatch.setattr(actor_pool.ray, "kill", lambda handle: None)
    pools = []

    def make(make_actor: Callable[[int], SimpleNamespace], size: int = 1, **options: Any) -> ActorPool:
        pools.append(ActorPool(make_actor, size, "worker", **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def numbered(*starts: list[SimpleNamespace]) -> Callable[[int], SimpleNamespace]:
    """Actors by number: those of each list one after the other, the last of them again and again."""
    lists = [list(actors) for actors in starts]
    return lambda number: lists[number].pop(0) if len(lists[number]) > 1 else lists[number][0]


def good() -> SimpleNamespace:
    return actor(probe=1, square=lambda x: x * x)


def accept(number: int, result: Any) -> None:
    return None


def wait_for_quarantine(pool: ActorPool, number: int) -> str:
    """Wait, and return why the replica is in quarantine."""
    end = time.monotonic() + SOON
    while number not in pool.quarantined:
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return pool.quarantined[number]


def test_a_replica_that_hangs_while_it_starts_is_left_out_beside_one_that_works(make_pool):
    pool = make_pool(numbered([good()], [actor()]), 2, validate=accept, start_timeout_seconds=0.05)
    wait_for_quarantine(pool, 1)
    assert pool.submit("square", 3).result(SOON) == 9


def test_calls_for_which_no_replica_finds_room_learn_what_became_of_the_others(make_pool):
    pending, broken = actor(probe=None), actor(probe=task_error(OSError("no weights in /lm")))
    pool = make_pool(numbered([pending], [broken]), 2, validate=accept, start_timeout_seconds=0.05)
    with pytest.raises(ActorPoolError, match=r"is there room for it.*1: it failed .*OSError: no weights in /lm"):
        pool.submit("square", 3).result(SOON)


def test_a_replica_killed_at_every_start_is_quarantined_in_the_end(make_pool):
    pool = make_pool(numbered([good()], [actor(probe=ActorDiedError())]), 2, validate=accept)
    wait_for_quarantine(pool, 1)
    assert pool.num_respawns == MAX_FAILED_STARTS - 1


def test_a_replica_that_the_user_has_to_mend_is_not_started_again(make_pool):
    broken = actor(probe=task_error(UserError("lm.path: DIR lacks lm_head.weight")))
    pool = make_pool(numbered([broken]), validate=accept)
    reason = wait_for_quarantine(pool, 0)
    assert reason == "it failed to start 1 times: UserError: lm.path: DIR lacks lm_head.weight"
    assert pool.num_respawns == 0


# Threads -----------------------------------------------------------------------------------------------------


def test_actors_have_the_threads_of_who_starts_them_and_not_rays_share(ray_session, monkeypatch):
    """Ray would set OMP_NUM_THREADS to the actor's one CPU."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert available_cores() == len(os.sched_getaffinity(0))  # of builders, searchers and ranks; the driver counts
    counted = ray.remote(available_cores).options(**place(SCORER, 0, thread_env(6)["env_vars"])).remote()
    assert ray.get(counted, timeout=100) == 6


# A failure of the dispatcher itself ----------------------------------------------------------------------------


class Unraisable(RayTaskError):
    """An error of the work that the dispatcher fails to hand on."""

    def as_instanceof_cause(self) -> RayTaskError:
        raise TypeError("no error can be made of it")


def test_the_call_at_which_the_dispatcher_fails_ends_with_the_others(make_pool):
    cause = ValueError("no such document")
    pool = make_pool(numbered([actor(square=Unraisable("score", "Traceback", cause, "worker", 1, "127.0.0.1"))]))
    for future in [pool.submit("square", x) for x in range(3)]:
        with pytest.raises(ActorPoolError, match="worker: the pool failed: TypeError: no error can be made of it"):
            future.result(SOON)
