"""The files of scores and of the budget under several processes, kill -9, damage, or as something else."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.data import files
from replug.models import score_cache
from replug.models.black_box_lm import ContinuationScore, GenerateCall, Mixture, ScoreCall, sum_of
from replug.models.generation import Generated, GenerationOptions
from replug.models.http.request_budget import BudgetSpent, RequestBudget
from replug.models.score_cache import ScoreCache, Stored, call_keys, pair_keys
from tests.support.cached_scores import num_cached
from tests.support.lm_answers import answer_bits

UNIT = 20
PROCESSES = multiprocessing.get_context("spawn")  # the test process has threads


def score_of(number: int, num_tokens: int = 5) -> ContinuationScore:
    return ContinuationScore(-np.random.default_rng(number).random(num_tokens, dtype=np.float32))


def key_of(number: int) -> bytes:
    return pair_keys("lm", ["prefix"], [str(number)])[0]


def unit_of(number: int, with_tokens: bool = False) -> dict[bytes, Stored]:
    """Return a unit's scores, or their sums alone."""
    scores = {key_of(row): score_of(row) for row in range(number * UNIT, (number + 1) * UNIT)}
    return {key: score if with_tokens else sum_of(score) for key, score in scores.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scores.sqlite"


@pytest.fixture
def cache(path: Path) -> Iterator[ScoreCache]:
    cache = ScoreCache(path)
    yield cache
    cache.close()


def test_what_is_stored_comes_back_and_what_is_not_is_left_out(cache: ScoreCache) -> None:
    cache.store("lm", {key_of(1): score_of(1), key_of(2): sum_of(score_of(2))})
    keys = [key_of(number) for number in range(4)]
    assert cache.sums(keys) == {key_of(1): sum_of(score_of(1)), key_of(2): sum_of(score_of(2))}
    found = cache.read(keys)
    assert list(found) == [key_of(1)]
    assert found[key_of(1)].token_logprobs.dtype == np.float32
    np.testing.assert_array_equal(found[key_of(1)].token_logprobs, score_of(1).token_logprobs)


def test_tokens_that_were_read_before_a_continuation_are_in_its_key_and_come_back(cache: ScoreCache) -> None:
    keys = [call_keys("lm", ScoreCall(["one"], [" two"], read=read))[0] for read in (0, 1, 2)]
    assert len({*keys, *call_keys("lm", ScoreCall(["one"], [" two"], opening="o"))}) == 3
    logprobs = np.array([-0.1, -0.2, -3.0], dtype=np.float32)
    stored = [ContinuationScore.of_pair(logprobs, [7, 2**31 - 1, 3], num_read) for num_read in (0, 1, 2)]
    cache.store("lm", dict(zip(keys, stored, strict=True)))
    found = cache.read(keys)
    for key, score in zip(keys, stored, strict=True):
        for part in ("token_logprobs", "read_logprobs", "read_ids"):
            np.testing.assert_array_equal(getattr(found[key], part), getattr(score, part))


def test_tokens_join_a_sum_and_nothing_else_replaces_a_row(cache: ScoreCache) -> None:
    for number, with_tokens, wanted in [(1, False, 1), (2, False, 1), (3, True, 3), (4, True, 3), (5, False, 3)]:
        cache.store("lm", {b"key": score_of(number) if with_tokens else sum_of(score_of(number))})
        assert cache.sums([b"key"]) == {b"key": sum_of(score_of(wanted))}
    np.testing.assert_array_equal(cache.read([b"key"])[b"key"].token_logprobs, score_of(3).token_logprobs)


@pytest.mark.parametrize("logprobs", [[], [-1.0, np.nan], [-np.inf, -1.0]], ids=str)
def test_a_score_without_tokens_or_not_finite_is_not_stored(cache: ScoreCache, logprobs: list[float]) -> None:
    wrong = np.array(logprobs, dtype=np.float32)
    cache.store("lm", {b"key": ContinuationScore(wrong)})
    for field in ("token_logprobs", "token_entropies") if logprobs else ():
        answer = replace(ANSWER, **{field: wrong})
        cache.store("lm", {b"answer": answer, b"samples": [ANSWER, answer]})
    assert count(cache) == 0


OPTIONS = GenerationOptions(8, stop="\n", temperature=0.7, top_p=0.9, seed=3)
LOGPROBS, ENTROPIES = np.array([-0.1, -2.5], np.float32), np.array([0.3, 1e-8], np.float32)
ANSWER = Generated("two words", LOGPROBS, ENTROPIES, np.array([1 / 3, 1e-300]), 17)
ANSWERS = [
    ANSWER,
    replace(ANSWER, text="日本語 🙂 \x00 \ud83d half"),
    replace(ANSWER, token_entropies=None, answer_tokens=5),
    replace(ANSWER, token_entropies=None, prompt_tokens=None),
    Generated("", LOGPROBS[:0], ENTROPIES[:0], prompt_tokens=0),
]


def test_answers_and_samples_come_back_bit_for_bit_and_are_never_replaced(cache: ScoreCache) -> None:
    keys = [str(number).encode() for number in range(len(ANSWERS))]
    cache.store("lm", {**dict(zip(keys, ANSWERS, strict=True)), b"samples": ANSWERS})
    cache.store("lm", {keys[0]: ANSWERS[1], b"samples": []})
    found = cache.read([*keys, b"samples", b"another"])
    stored = [answer_bits(answer) for answer in ANSWERS]
    assert [answer_bits(answer) for answer in found.pop(b"samples")] == stored
    assert [answer_bits(found.pop(key)) for key in keys] == stored and not found
    assert num_cached(cache.path) == {"answers": 5, "samples": 1}


def test_all_that_an_answer_follows_from_is_in_its_key_and_an_opening_is_not() -> None:
    def key(identity="lm", prompts=("one", "two"), weights=(0.25, 0.75), **options) -> bytes:
        [found] = call_keys(identity, GenerateCall([Mixture(prompts, weights)], replace(OPTIONS, **options)))
        return found

    others = [
        *(key("another"), key(prompts=["one", "three"]), key(prompts=["two", "one"]), key(prompts=["onetwo", ""])),
        *(key(prompts=["one"], weights=[1.0]), key(weights=[0.75, 0.25]), key(weights=[0.25, np.nextafter(0.75, 1)])),
        *(key(max_new_tokens=9), key(stop=None), key(stop="None"), key(stop=["\n", "None"])),
        *(key(temperature=0.0), key(top_p=1.0), key(seed=4)),
        *call_keys("lm", GenerateCall(["one", "two"], OPTIONS, draws=True)),
        *call_keys("lm", GenerateCall(["one"], replace(OPTIONS, num_samples=2), draws=True)),
    ]
    assert len({key(), *others}) == 1 + len(others)
    assert key(opening="one", weights=np.array([0.25, 0.75])) == key()


# Files that are something else, and network file systems ------------------------------------------------


def count(cache: ScoreCache) -> int:
    """Return the rows of a file that is sound."""
    assert cache._database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    return cache._database.execute("SELECT count(*) FROM cached").fetchone()[0]


def refused(path: Path, *says: str) -> None:
    with pytest.raises(UserError) as caught:
        ScoreCache(path)
    message = str(caught.value)
    assert [part for part in (str(path), *says) if part not in message] == [], message


def test_a_file_that_is_something_else_is_refused_and_left_as_it_is(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE scores (key BLOB PRIMARY KEY, logprobs BLOB NOT NULL) WITHOUT ROWID")
    database.close()
    other = path.read_bytes(), ("another program's", "give another file")
    text = b"years of work" * 100, ("file is not a database",)
    for content, says in (other, text):
        path.write_bytes(content)
        refused(path, *says)
        assert path.read_bytes() == content
        assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.fixture
def network(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's folder lies on NFS, by what the system says."""
    mounts = [SimpleNamespace(mountpoint=str(path.parent), fstype="nfs4")]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(score_cache, "SECONDS_TO_WAIT_FOR_WRITERS", 0.1)


@pytest.mark.usefixtures("network")
def test_on_a_network_file_system_no_memory_is_shared_and_a_second_process_is_refused(path: Path) -> None:
    cache = ScoreCache(path)
    refused(path, "network file system (nfs4)", "one process at a time", "lm.cache")
    for number in range(5):
        cache.store("lm", unit_of(number))
        assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}-journal"}
    cache.close()
    cache = ScoreCache(path)
    assert len(cache.sums([key_of(row) for row in range(5 * UNIT)])) == count(cache) == 5 * UNIT
    cache.close()


@pytest.mark.usefixtures("network")
def test_kill_9_on_a_network_file_system_leaves_whole_units_and_the_file_free(path: Path) -> None:
    process = os.fork()
    if process == 0:
        cache = ScoreCache(path)
        cache.store("lm", unit_of(0))
        cache._database.execute("BEGIN")
        cache._database.execute("DELETE FROM cached")
        cache._database.execute("PRAGMA cache_spill = 1")
        os._exit(0)  # as by kill -9: nothing is rolled back
    os.waitpid(process, 0)
    cache = ScoreCache(path)
    assert count(cache) == UNIT
    cache.close()


def test_damage_found_when_reading_names_the_file_and_the_command(path: Path) -> None:
    cache = ScoreCache(path)
    for number in range(100):
        cache.store("lm", unit_of(number, with_tokens=True))
    cache.close()
    content = path.read_bytes()
    path.write_bytes(content[: 3 * 4096] + bytes(len(content) - 3 * 4096))
    with pytest.raises(RunError, match=rf"{path}.*malformed"):
        ScoreCache(path).read([key_of(row) for row in range(2000)])


FINGERPRINT = -np.random.default_rng(0).random(64, dtype=np.float32) * 8


def test_a_served_model_keeps_its_identity_from_day_to_day(cache: ScoreCache, path: Path) -> None:
    identity = cache.identity_like("llama", FINGERPRINT)
    assert identity.startswith("llama#")
    tomorrow = FINGERPRINT + np.random.default_rng(1).uniform(-0.02, 0.02, 64).astype(np.float32)
    assert cache.identity_like("llama", tomorrow) == identity
    again = ScoreCache(path)
    assert again.identity_like("llama", FINGERPRINT.astype(np.float64)) == identity
    other = again.identity_like("llama", FINGERPRINT - 1)
    assert other != identity and again.identity_like("llama", FINGERPRINT - 1.001) == other
    again.close()


def write_for_ever(path: Path, done: Path) -> None:
    """Write units without end and report each, once it is stored."""
    cache = ScoreCache(path)
    with done.open("a") as report:
        for unit in itertools.count(time.time_ns() % 10**9):
            cache.store("lm", unit_of(unit, with_tokens=unit % 2 == 0))
            report.write(f"{unit}\n")
            report.flush()


def started(target: Callable, *arguments: object) -> BaseProcess:
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def write_together(folder: Path, barrier: threading.Barrier, first: int) -> None:
    for number in range(3):
        barrier.wait(200)
        cache = ScoreCache(folder / f"{number}.sqlite")
        for unit in range(first, first + 4):
            cache.store("lm", unit_of(unit, with_tokens=first != 2))
        cache.close()


def test_processes_may_make_and_fill_a_file_at_the_same_moment_and_lose_nothing(tmp_path: Path) -> None:
    barrier = PROCESSES.Barrier(3)
    writers = [started(write_together, tmp_path, barrier, first) for first in (0, 2, 4)]
    for writer in writers:
        writer.join(300)
    assert [writer.exitcode for writer in writers] == [0] * 3
    for number in range(3):
        cache = ScoreCache(tmp_path / f"{number}.sqlite")
        counts = num_cached(cache.path)
        assert count(cache) == counts["scores"] == counts["with tokens"] == 8 * UNIT  # those with tokens cover all
        cache.close()


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_stored_unit_and_leaves_none_in_half(tmp_path: Path) -> None:
    path, done, waits = tmp_path / "scores.sqlite", tmp_path / "done", random.Random(0)
    for _ in range(15):
        writers = [started(write_for_ever, path, done) for _ in range(2)]
        before = done.stat().st_size if done.exists() else 0
        while not done.exists() or done.stat().st_size == before:
            time.sleep(0.005)
        time.sleep(waits.uniform(0, 0.1))
        for writer in writers:
            writer.kill()
            writer.join(200)
        cache = ScoreCache(path)
        reported = [int(line) for line in done.read_text().splitlines(keepends=True) if line.endswith("\n")]
        stored = cache.sums([key_of(row) for unit in reported for row in range(unit * UNIT, (unit + 1) * UNIT)])
        assert len(stored) == len(set(reported)) * UNIT
        assert count(cache) % UNIT == 0
        cache.close()
    assert len(reported) > 100


# The budget of requests: never passed, never forgotten ------------------------------------------------


@pytest.fixture
def budget_file(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "budget.json"


def spent(budget_file: Path) -> dict[str, int]:
    return json.loads(budget_file.read_text())


def test_a_request_counts_at_most_what_was_reserved_and_then_what_it_cost(budget_file: Path) -> None:
    budget = RequestBudget(budget_file)
    assert budget.reserve(100)
    assert (budget.requests, budget.tokens) == (1, 0)
    assert spent(budget_file) == {"requests": 1, "tokens": 100}
    budget.settle(100, 60)
    assert (budget.requests, budget.tokens) == (1, 60)
    assert spent(budget_file) == {"requests": 1, "tokens": 60}


def test_it_goes_on_where_it_was_when_it_is_opened_again(budget_file: Path) -> None:
    first = RequestBudget(budget_file, max_requests=3, max_tokens=100)
    for _ in range(2):
        assert first.reserve(20)
        first.settle(20, 15)
    again = RequestBudget(budget_file, max_requests=3, max_tokens=100)
    assert (again.requests, again.tokens) == (2, 30)
    assert again.reserve(70)
    with pytest.raises(BudgetSpent, match=r"lm\.max_requests=3"):
        again.reserve(1)
    raised = RequestBudget(budget_file, max_requests=4, max_tokens=100)
    assert raised.requests == 3


def test_a_reservation_that_may_fit_later_waits_and_one_that_cannot_says_what_is_spent() -> None:
    budget = RequestBudget(None, max_tokens=100)
    assert budget.reserve(60)
    assert not budget.reserve(60)  # the first may turn out to cost less
    budget.settle(60, 40)
    assert budget.reserve(60)
    assert not budget.reserve(1)
    budget.settle(60, 60)
    with pytest.raises(RunError, match=r"lm\.max_tokens_sent=100 .* 100 tokens are spent and it may take 1; raise it"):
        budget.reserve(1)


def test_a_broken_budget_file_does_not_begin_at_0(budget_file: Path) -> None:
    budget_file.parent.mkdir()
    budget_file.write_text("nonsense")
    with pytest.raises(ValueError, match="Expecting value"):
        RequestBudget(budget_file)


def test_processes_at_once_never_pass_the_limit_and_lose_no_count(budget_file: Path) -> None:
    processes = [spending(budget_file, max_requests=300) for _ in range(3)]
    said = [process.communicate(timeout=200)[0].count(b"sent\n") for process in processes]
    assert sum(said) == 300
    assert spent(budget_file) == {"requests": 300, "tokens": 2400}


def spending(budget_file: Path, max_requests: int | None = None) -> subprocess.Popen:
    """A process that says when a request is sent."""
    code = f"""
from pathlib import Path
from replug.models.http.request_budget import RequestBudget

budget = RequestBudget(Path({str(budget_file)!r}), {max_requests})
while True:
    budget.reserve(10)
    print("sent", flush=True)
    budget.settle(10, 8)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_kill_9_at_any_moment_leaves_a_whole_line_that_counts_all_that_was_sent(budget_file: Path) -> None:
    total = 0
    for pause in (0.0, 0.003, 0.01, 0.03):
        process = spending(budget_file)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(pause)
        os.kill(process.pid, signal.SIGKILL)
        total += 1 + process.stdout.read().count(b"sent\n")
        process.wait()
        counted = spent(budget_file)
        assert len(budget_file.read_bytes()) == 64
        assert counted["tokens"] >= 8 * total
        assert (
            0 <= counted["requests"] - total <= 4
        )  # at most the one that was reserved and not yet sent, for each kill
