"""The file of scores under several processes, kill -9, damage, and files that are something else."""

import os
import random
import sqlite3
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
from replug.models.score_cache import ScoreCache, Stored, call_keys, pair_keys
from tests.support.cached_scores import num_cached
from tests.support.processes import PROCESSES

UNIT = 20


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


# Rows ---------------------------------------------------------------------------------------------------


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


def bits(answer: Generated) -> tuple:
    entropies = None if answer.token_entropies is None else answer.token_entropies.tobytes()
    counts = answer.weights.tobytes(), answer.prompt_tokens, answer.answer_tokens
    return answer.text, answer.token_logprobs.tobytes(), entropies, *counts


def test_answers_and_samples_come_back_bit_for_bit_and_are_never_replaced(cache: ScoreCache) -> None:
    keys = [str(number).encode() for number in range(len(ANSWERS))]
    cache.store("lm", {**dict(zip(keys, ANSWERS, strict=True)), b"samples": ANSWERS})
    cache.store("lm", {keys[0]: ANSWERS[1], b"samples": []})
    found = cache.read([*keys, b"samples", b"another"])
    assert {key: bits(found.pop(key)) for key in keys} == dict(zip(keys, map(bits, ANSWERS), strict=True))
    assert [bits(answer) for answer in found.pop(b"samples")] == [bits(answer) for answer in ANSWERS]
    assert not found
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


# Files that are something else --------------------------------------------------------------------------


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


# Network file systems -----------------------------------------------------------------------------------


@pytest.fixture
def network(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's folder lies on NFS, by what the system says."""
    mounts = [SimpleNamespace(mountpoint=str(path.parent), fstype="nfs4")]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(score_cache, "SECONDS_TO_WAIT_FOR_WRITERS", 0.1)


def beside(path: Path) -> set[str]:
    return {file.name.removeprefix(path.name) for file in path.parent.iterdir() if file.name.startswith(path.name)}


@pytest.mark.usefixtures("network")
def test_on_a_network_file_system_no_memory_is_shared_and_what_is_stored_comes_back(path: Path) -> None:
    cache = ScoreCache(path)
    for number in range(5):
        cache.store("lm", unit_of(number))
        assert beside(path) == {"", "-journal"}
    cache.close()
    cache = ScoreCache(path)
    assert len(cache.sums([key_of(row) for row in range(5 * UNIT)])) == 5 * UNIT
    assert is_sound(cache)
    cache.close()


@pytest.mark.usefixtures("network")
def test_on_a_network_file_system_a_second_process_is_refused_by_name(path: Path) -> None:
    cache = ScoreCache(path)
    refused(path, "network file system (nfs4)", "one process at a time", "lm.cache")
    cache.store("lm", unit_of(0))
    cache.close()
    ScoreCache(path).close()


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
    assert is_sound(cache)
    cache.close()


# Damage -------------------------------------------------------------------------------------------------


def count(cache: ScoreCache) -> int:
    return cache._database.execute("SELECT count(*) FROM cached").fetchone()[0]


def is_sound(cache: ScoreCache) -> bool:
    return cache._database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)


def damaged(path: Path, bytes_kept: int) -> Path:
    """A cache of 2,000 rows, overwritten with zeros from a place on."""
    cache = ScoreCache(path)
    for number in range(100):
        cache.store("lm", unit_of(number, with_tokens=True))
    cache.close()
    content = path.read_bytes()
    path.write_bytes(content[:bytes_kept] + bytes(len(content) - bytes_kept))
    return path


def test_damage_found_when_reading_names_the_file_and_the_command(path: Path) -> None:
    cache = ScoreCache(damaged(path, 3 * 4096))
    with pytest.raises(RunError) as caught:
        cache.read([key_of(row) for row in range(2000)])
    assert "malformed" in str(caught.value)
    assert str(path) in str(caught.value)


# Served models ------------------------------------------------------------------------------------------

FINGERPRINT = -np.random.default_rng(0).random(64, dtype=np.float32) * 8


def test_a_served_model_keeps_its_identity_from_day_to_day(cache: ScoreCache, path: Path) -> None:
    identity = cache.identity_like("llama", FINGERPRINT)
    assert identity.startswith("llama#")
    tomorrow = FINGERPRINT + np.random.default_rng(1).uniform(-0.02, 0.02, 64).astype(np.float32)
    assert not np.array_equal(tomorrow, FINGERPRINT)
    assert cache.identity_like("llama", tomorrow) == identity
    again = ScoreCache(path)
    assert again.identity_like("llama", FINGERPRINT.astype(np.float64)) == identity
    other = again.identity_like("llama", FINGERPRINT - 1)
    assert other != identity and again.identity_like("llama", FINGERPRINT - 1.001) == other
    again.close()


# Several processes, and kill -9 -------------------------------------------------------------------------


def write_for_ever(path: Path, done: Path) -> None:
    """Write units without end and report each, once it is stored."""
    cache = ScoreCache(path)
    with done.open("a") as report:
        start = int(time.time_ns())
        for unit in range(start, start + 10**9):
            cache.store("lm", unit_of(unit % 10**9, with_tokens=unit % 2 == 0))
            report.write(f"{unit % 10**9}\n")
            report.flush()


def started(target: Callable, *arguments: object) -> BaseProcess:
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def write_together(folder: Path, barrier: threading.Barrier, first: int) -> None:
    for number in range(8):
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
    for number in range(8):
        cache = ScoreCache(tmp_path / f"{number}.sqlite")
        counts = num_cached(cache.path)
        assert counts["scores"] == counts["with tokens"] == 8 * UNIT  # those with tokens cover all
        assert is_sound(cache)
        cache.close()


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_stored_unit_and_leaves_none_in_half(tmp_path: Path) -> None:
    path, done, waits = tmp_path / "scores.sqlite", tmp_path / "done", random.Random(0)
    for _ in range(25):
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
        assert is_sound(cache)
        cache.close()
    assert len(reported) > 100
