"""The actor pool and the scorer pool, on real Ray with real kill -9."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from replug.cluster.actor_pool import ActorPool, ActorPoolError, is_device_fault
from replug.models.black_box_lm import AsyncLM, ContinuationScore, ScoreCall, UnscorableText, sum_of
from replug.models.generation import GenerationOptions
from replug.models.lm_source import GivenSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.scorer_pool import ScorerPool
from tests.support.lm_answers import texts_of

pytestmark = pytest.mark.usefixtures("ray_session")

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


def test_killed_replicas_lose_no_work():
    pool = make_pool(2)
    futures = []
    for kills in (1, 2, 3):
        wait_until(lambda: pool.num_up == 2)
        pid = ray.get(pool.handles()[0].process.remote(), timeout=300)
        os.kill(pid, signal.SIGSTOP)  # so that it dies with work in hand, however fast the other is
        futures += [pool.submit("square", x) for x in range(10)]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda kills=kills: pool.num_respawns == kills)
    assert [future.result(300) for future in futures] == [x * x for x in range(10)] * 3
    pool.close()


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[ActorPool]:
    """One replica for all tests that end none."""
    pool = make_pool(1)
    yield pool
    pool.close()


def test_an_error_of_the_work_itself_reaches_the_caller_and_is_not_retried(pool: ActorPool):
    with pytest.raises(ValueError, match="doc-7"):
        pool.submit("fail").result(300)
    assert pool.num_respawns == 0
    assert pool.submit("square", 3).result(300) == 9


def test_work_that_always_kills_its_worker_ends_in_an_error():
    pool = make_pool(1, max_attempts=2)
    with pytest.raises(ActorPoolError, match="die failed 2 times"):
        pool.submit("die").result(300)
    assert pool.submit("square", 3).result(300) == 9
    pool.close()


def test_a_hanging_call_is_done_again_by_a_new_replica():
    pool = make_pool(1, timeout_seconds=1.0, max_attempts=2)
    with pytest.raises(ActorPoolError, match="no answer within 1 s"):
        pool.submit("square", 3, 60.0).result(300)
    assert pool.num_respawns == 2
    pool.close()


def test_closing_ends_what_is_open_with_an_error():
    pool = make_pool(1)
    future = pool.submit("square", 3, 30.0)
    pool.close()
    with pytest.raises(ActorPoolError, match="closed"):
        future.result(60)


@pytest.fixture(scope="module")
def scorers(ray_session: None) -> Iterator[ScorerPool]:
    """Two replicas for all tests that end none; each call takes 0.3 s, so that both get some."""
    pool = ScorerPool(GivenSource(StandInLM(0.3)), num_replicas=2, threads=1)
    yield pool
    pool.close()


def test_the_scorer_pool_answers_as_the_lm_itself(scorers: ScorerPool):
    pool = scorers
    prefixes, continuations = ["a b c", "c d"], [" a b", " e"]
    expected = StandInLM().score(prefixes, continuations)
    scores = pool.score(prefixes, continuations)
    assert [s.token_logprobs.tolist() for s in scores] == [s.token_logprobs.tolist() for s in expected]
    assert texts_of(pool, ["a b b"], 2) == ["b b"]
    options = GenerationOptions(4, num_samples=3, temperature=1.0)
    drawn, here = (lm.sample(["a b c", "d e"], options) for lm in (pool, StandInLM()))
    assert [[one.text for one in some] for some in drawn] == [[one.text for one in some] for some in here]
    assert isinstance(pool, AsyncLM)
    assert pool.identity == StandInLM.identity


class OtherLM(StandInLM):
    """Reads prefixes in capitals."""

    identity = "other"

    def score(self, prefixes: Sequence[str], continuations: Sequence[str], **options: Any) -> list[ContinuationScore]:
        return super().score([prefix.upper() for prefix in prefixes], continuations, **options)


def test_a_replica_holds_a_second_lm_whose_answers_are_its_own():
    pool = ScorerPool(GivenSource(StandInLM()), num_replicas=1, threads=1, second=GivenSource(OtherLM()))
    assert pool.second is not None and (pool.identity, pool.second.identity) == (StandInLM.identity, "other")
    prefixes, continuations = ["a b c", "c d"], [" a b", " e"]
    for lm, alone in ((pool, StandInLM()), (pool.second, OtherLM())):
        expected = [score.sum_logprob for score in alone.score(prefixes, continuations)]
        assert [score.sum_logprob for score in lm.score(prefixes, continuations)] == expected
        assert texts_of(lm, ["a b b"], 2) == ["b b"]
    pool.second.close()
    assert pool.score(prefixes, continuations), "the second LM ends with the pool"
    pool.close()


def test_ray_listens_on_loopback_only():
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    ours = {p.pid for p in psutil.Process().children(recursive=True)}
    addresses = {c.laddr.ip.removeprefix("::ffff:") for c in listening if c.pid in ours}
    assert addresses and addresses <= {"127.0.0.1", "::1"}


# Replicas that cannot start, or that answer unlike the others -----------------------------------------------


class Picky:
    """A worker whose number decides what becomes of it."""

    def __init__(self, number: int, folder: str = "") -> None:
        if number == 1:
            raise ValueError(f"no weights in {folder}")
        self.number = number

    def probe(self) -> float:
        return -5.2 if self.number != 2 else -3.1

    def who(self) -> int:
        time.sleep(0.01)
        return self.number


def picky_pool(numbers: list[int], **options: float) -> ActorPool:
    def validate(number: int, value: float) -> str | None:
        return None if value == -5.2 else f"it gives {value} where the others give -5.2"

    return ActorPool(
        lambda n: ray.remote(Picky).options(num_cpus=0).remote(numbers[n], "/lm"), len(numbers), "worker",
        validate=validate, **options,
    )  # fmt: skip


def test_a_replica_that_cannot_start_or_fails_its_probe_is_quarantined_and_the_others_do_the_work():
    pool = picky_pool([0, 1, 2, 3])
    who = {future.result(300) for future in [pool.submit("who") for _ in range(200)]}
    wait_until(lambda: len(pool.quarantined) == 2)
    assert who <= {0, 3}
    assert "no weights in /lm" in pool.quarantined[1]
    assert "-3.1" in pool.quarantined[2]
    assert pool.num_up == 2
    pool.close()


class Loading:
    """A worker whose GPU fails."""

    def __init__(self, lives: Path | None = None) -> None:
        self.lives = lives

    def probe(self) -> int:
        return 0

    def who(self) -> int:
        return 0

    def fault(self, error: Exception, times: int) -> int:
        """Fails so many times in all, each time in another process; returns in how many it has been."""
        (self.lives / f"{os.getpid()}").touch()
        if len(list(self.lives.iterdir())) <= times:
            raise error
        return len(list(self.lives.iterdir()))


ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_fault_of_the_gpu_replaces_the_replica_and_the_call_is_done_again(tmp_path):
    actor = ray.remote(Loading).options(num_cpus=0)
    pool = ActorPool(lambda _: actor.remote(tmp_path), 1, "worker", validate=lambda *_: None, max_attempts=3)
    assert pool.submit("fault", ILLEGAL, 2).result(300) == 3
    assert (pool.num_respawns, pool.num_retries) == (2, 2)
    pool.close()


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("NCCL error in: unhandled cuda error"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
    ids=str,
)
def test_what_is_a_fault_of_the_gpu(error: Exception, is_fault: bool):
    assert is_device_fault(error) is is_fault


# The dispatcher itself ----------------------------------------------------------------------------------------


def test_a_cancelled_call_is_not_done_and_hurts_no_other(pool: ActorPool):
    first = pool.submit("square", 2, 0.5)
    calls = [pool.submit("square", x) for x in range(6)]
    assert calls[5].cancel()
    assert first.result(300) == 4
    assert [call.result(300) for call in calls[:5]] == [x * x for x in range(5)]
    assert pool.submit("square", 9).result(300) == 81


def test_arguments_that_cannot_travel_are_their_own_calls_error(pool: ActorPool):
    with pytest.raises(TypeError, match="serialize"):
        pool.submit("square", threading.Lock()).result(60)
    assert pool.submit("square", 3).result(300) == 9


def wait_until(holds, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_replica_with_other_weights_is_not_let_in(scorers: ScorerPool):
    pool = scorers
    wait_until(lambda: pool.pool.num_up == 2)
    good = [logprobs.copy() for logprobs in pool._reference]
    assert pool._validate(1, good) is None
    assert "0.60 nats" in pool._validate(1, [good[0], good[1] - 0.6])
    assert "not finite" in pool._validate(1, [good[0], good[1] * float("nan")])
    assert "other tokens" in pool._validate(1, [good[0], good[1][:-1]])


def test_several_units_in_a_call_give_each_row_its_own_score(scorers: ScorerPool, monkeypatch: pytest.MonkeyPatch):
    pool = scorers
    wait_until(lambda: pool.pool.num_up == 2)
    monkeypatch.setattr(pool, "_units_per_call", 8)
    prefixes, continuations = [f"a {'b ' * n}" for n in range(6)], [" c" + " d" * (n % 4) for n in range(6)]
    monkeypatch.setattr(pool, "units", lambda call: [[3, 0], [5], [1, 4], [2]])
    answered = pool.submit_units(ScoreCall(prefixes, continuations, sums_only=True))
    found = {row: one for rows, scores in answered for row, one in zip(rows, scores.result(300), strict=True)}
    expected = StandInLM().score(prefixes, continuations)
    assert [found[row] for row in range(6)] == [sum_of(score) for score in expected]
    assert len(answered) == 2


def test_the_pool_reports_rates_and_shares(scorers: ScorerPool):
    pool = scorers
    wait_until(lambda: pool.pool.num_up == 2)  # else the first does it all while the other starts
    pool.metrics()
    futures = [pool.submit(["a b c"] * 4, [" d e"] * 4) for _ in range(10)]
    [future.result(300) for future in futures]
    metrics = pool.metrics()
    assert 0.5 < metrics["busy_share"] <= 1
    assert metrics["tokens_per_second"] > 0
    assert (metrics["replicas"], metrics["respawns"], metrics["retries"]) == (2, 0, 0)
    assert pool.metrics()["tokens_per_second"] == 0


def test_a_text_that_cannot_be_scored_comes_back_as_one_line(scorers: ScorerPool):
    with pytest.raises(UnscorableText) as caught:
        scorers.score(["a"], [""])
    assert str(caught.value) == "continuation 0 is empty; expected a text to score"
