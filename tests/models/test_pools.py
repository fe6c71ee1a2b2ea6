"""The actor pool and the scorer pool, on real Ray with real kill -9; and how their work is cut."""

import os
import random
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
from transformers import GPT2Config, LlamaConfig

from replug.cluster import actor_pool
from replug.cluster.actor_pool import ActorPool, ActorPoolError, is_device_fault
from replug.models.batching import even_batches, token_budget_batches, units_of_similar_length, weights_of_layers
from replug.models.black_box_lm import AsyncLM, ContinuationScore, ScoreCall, UnscorableText, sum_of
from replug.models.generation import GenerationOptions
from replug.models.lm_source import GivenSource
from replug.models.local.hf_lm import HuggingFaceSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.model_files import lm_weights
from replug.models.scorer_pool import ScorerPool
from tests.support.lm_answers import bits, texts_of
from tests.support.tiny_lms import write_gpt2

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

    def fault(self, failed: Path) -> str:
        """Fails as a GPU does, until another process has."""
        if failed.exists() and failed.read_text() != str(os.getpid()):
            return "done again"
        failed.write_text(str(os.getpid()))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def make_pool(size: int, **options: float) -> ActorPool:
    return ActorPool(lambda number: ray.remote(Worker).options(num_cpus=0).remote(), size, "worker", **options)


def test_killed_replicas_lose_no_work():
    pool = make_pool(2)
    futures = []
    for kills in (1, 2):
        wait_until(lambda: pool.num_up == 2)
        pid = ray.get(pool.handles()[0].process.remote(), timeout=300)
        os.kill(pid, signal.SIGSTOP)  # so that it dies with work in hand, however fast the other is
        futures += [pool.submit("square", x) for x in range(10)]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda kills=kills: pool.num_respawns == kills)
    assert [future.result(300) for future in futures] == [x * x for x in range(10)] * 2
    pool.close()


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[ActorPool]:
    """One replica for all tests that end none."""
    pool = make_pool(1)
    yield pool
    pool.close()


def test_an_error_of_the_work_or_its_arguments_reaches_the_caller_and_is_not_retried(pool: ActorPool):
    with pytest.raises(ValueError, match="doc-7"):
        pool.submit("fail").result(300)
    with pytest.raises(TypeError, match="serialize"):
        pool.submit("square", threading.Lock()).result(60)
    assert pool.submit("square", 3).result(300) == 9 and pool.num_respawns == 0


def test_work_that_kills_its_worker_or_hangs_is_done_again_by_a_new_one_and_ends_in_an_error():
    pool = make_pool(1, timeout_seconds=1.0, max_attempts=2)
    with pytest.raises(ActorPoolError, match="die failed 2 times"):
        pool.submit("die").result(300)
    with pytest.raises(ActorPoolError, match="no answer within 1 s"):
        pool.submit("square", 3, 60.0).result(300)
    assert pool.num_respawns == 4
    pool.close()


def test_closing_ends_what_is_open_with_an_error():
    pool = make_pool(1)
    future = pool.submit("square", 3, 30.0)
    pool.close()
    with pytest.raises(ActorPoolError, match="closed"):
        future.result(60)


class OtherLM(StandInLM):
    """Reads prefixes in capitals."""

    identity = "other"

    def score(self, prefixes: Sequence[str], continuations: Sequence[str], **options: Any) -> list[ContinuationScore]:
        return super().score([prefix.upper() for prefix in prefixes], continuations, **options)


@pytest.fixture(scope="module")
def scorers(ray_session: None) -> Iterator[ScorerPool]:
    """Two replicas of two LMs; each call of the first takes 0.3 s, so that both replicas get some."""
    pool = ScorerPool(GivenSource(StandInLM(0.3)), num_replicas=2, threads=1, second=GivenSource(OtherLM()))
    wait_until(lambda: pool.pool.num_up == 2)  # else one does it all while the other starts
    yield pool
    pool.close()


def test_a_pool_answers_as_its_lm_itself_and_as_the_second_that_its_replicas_hold(scorers: ScorerPool):
    assert scorers.second is not None
    prefixes, continuations = ["a b c", "c d"], [" a b", " e"]
    options = GenerationOptions(4, num_samples=3, temperature=1.0)
    for pool, alone in ((scorers.second, OtherLM()), (scorers, StandInLM())):
        assert isinstance(pool, AsyncLM) and pool.identity == alone.identity
        assert bits(pool.score(prefixes, continuations)) == bits(alone.score(prefixes, continuations))
        assert texts_of(pool, ["a b b"], 2) == ["b b"]
        drawn, here = (lm.sample(["a b c", "d e"], options) for lm in (pool, alone))
        assert [[one.text for one in some] for some in drawn] == [[one.text for one in some] for some in here]
        scorers.second.close()  # ends with the pool


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


def test_a_replica_that_cannot_start_or_fails_its_probe_is_quarantined_and_the_others_do_the_work(monkeypatch):
    def validate(number: int, value: float) -> str | None:
        return None if value == -5.2 else f"it gives {value} where the others give -5.2"

    monkeypatch.setattr(actor_pool, "MAX_FAILED_STARTS", 2)
    actor = ray.remote(Picky).options(num_cpus=0)
    pool = ActorPool(lambda number: actor.remote(number, "/lm"), 4, "worker", validate=validate)
    who = {future.result(300) for future in [pool.submit("who") for _ in range(200)]}
    wait_until(lambda: len(pool.quarantined) == 2)
    assert who <= {0, 3} and pool.num_up == 2
    assert "no weights in /lm" in pool.quarantined[1]
    assert "-3.1" in pool.quarantined[2]
    pool.close()


def test_a_fault_of_the_gpu_replaces_the_replica_and_the_call_is_done_again(tmp_path):
    pool = make_pool(1)
    assert pool.submit("fault", tmp_path / "failed").result(300) == "done again"
    assert (pool.num_respawns, pool.num_retries) == (1, 1)
    pool.close()


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
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


def test_a_cancelled_call_is_not_done_and_hurts_no_other(pool: ActorPool):
    first = pool.submit("square", 2, 0.5)
    calls = [pool.submit("square", x) for x in range(6)]
    assert calls[5].cancel()
    assert first.result(300) == 4
    assert [call.result(300) for call in calls[:5]] == [x * x for x in range(5)]
    assert pool.submit("square", 9).result(300) == 81


def wait_until(holds, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_replica_with_other_weights_is_not_let_in(scorers: ScorerPool):
    pool, (first, *good) = scorers, scorers._reference
    assert pool._validate(1, [first, *good]) is None
    assert "0.60 nats" in pool._validate(1, [first - 0.6, *good])
    assert "not finite" in pool._validate(1, [first * float("nan"), *good])
    assert "other tokens" in pool._validate(1, [first[:-1], *good])


def test_several_units_in_a_call_give_each_row_its_own_score(scorers: ScorerPool, monkeypatch: pytest.MonkeyPatch):
    pool = scorers
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
    pool.metrics()
    futures = [pool.submit(["a b c"] * 4, [" d e"] * 4) for _ in range(5)]
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


# Units that keep many replicas at work, and passes of which none is a remnant ---------------------------------


def padded(lengths: list[int], batches: list[list[int]]) -> list[int]:
    return [len(batch) * max(lengths[row] for row in batch) for batch in batches]


@pytest.mark.parametrize("seed", range(5))
def test_even_batches_are_as_few_as_greedy_ones_and_pad_no_more_than_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 80))]
    budget = rng.randint(60, 900)
    greedy, even = list(token_budget_batches(lengths, budget)), even_batches(lengths, budget)
    assert len(even) <= len(greedy)
    for batches in (greedy, even):
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        in_order = [lengths[row] for batch in batches for row in batch]
        assert in_order == sorted(lengths, reverse=True)
        assert max(padded(lengths, batches)) <= budget


def test_a_unit_a_little_beyond_a_pass_is_two_of_half_a_pass() -> None:
    lengths = [100] * 12
    assert [len(batch) for batch in token_budget_batches(lengths, 1000)] == [10, 2]
    assert [len(batch) for batch in even_batches(lengths, 1000)] == [6, 6]
    assert even_batches([5, 3], 10) == [[0, 1]]
    assert even_batches([], 10) == list(token_budget_batches([], 10)) == []
    assert even_batches([50, 40], 10) == [[0], [1]]  # more than a pass holds: one at a time


def test_a_models_layers_and_width_are_read_from_its_configuration(tmp_path: Path) -> None:
    assert lm_weights(GPT2Config(n_layer=48, n_embd=1600)) == weights_of_layers(48, 1600)
    assert lm_weights(LlamaConfig()) == weights_of_layers(32, 4096)
    write_gpt2(tmp_path)
    source = HuggingFaceSource(str(tmp_path))
    assert source.num_weights == weights_of_layers(2, 32)
    assert (source.tokens_per_unit(on_gpu=True), source.tokens_per_unit(on_gpu=False)) == (32_768, 8192)
    assert GivenSource(StandInLM(), 20).tokens_per_unit(on_gpu=False) == 160


@pytest.mark.parametrize("continuation", [" end", " and the end"])
def test_units_stay_the_same_when_whole_units_are_gone(continuation: str) -> None:
    prefixes = ["word " * (1 + 7 * row % 40) for row in range(100)]
    units = units_of_similar_length(prefixes, [continuation] * 100, 160)
    assert sorted(row for unit in units for row in unit) == list(range(100))
    assert len(units) > 5
    for gone in (units[0:1], units[3:5], units[-1:], units[::2]):
        left = [row for row in range(100) if all(row not in unit for unit in gone)]
        again = units_of_similar_length([prefixes[row] for row in left], [continuation] * len(left), 160)
        assert [[left[row] for row in unit] for unit in again] == [unit for unit in units if unit not in gone]


def test_choices_after_one_prefix_are_one_unit_and_cost_its_bytes_once() -> None:
    prefixes = [f"{number} " + "x" * 300 for number in range(4) for _ in "ABCD"]
    units = units_of_similar_length(prefixes, [" A", " B", " C", " D"] * 4, 160)  # 640 bytes in a unit
    assert units == [list(range(8)), list(range(8, 16))]
    assert len(units_of_similar_length(prefixes, [" a longer text"] * 16, 160)) == 8
