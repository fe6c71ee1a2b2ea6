"""`replug verify` of a cache of scores: what it shows, finds and deletes, and the statuses it ends with."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from replug.commands.checks.scores import verify_scores
from replug.config.errors import RunError
from replug.models.answer_table import GenerationCache
from replug.models.black_box_lm import ContinuationScore
from replug.models.generation import Generated
from replug.models.score_cache import NewScore, ScoreCache

ROOT = Path(__file__).parents[2]
DAY = 86_400


def fill(path: Path, identity: str, first: int, num_rows: int, with_tokens: bool = False, age_days: float = 0) -> None:
    """Rows with keys of their own, asked for three times."""
    cache = ScoreCache(path)
    logprobs = -np.random.default_rng(0).random(128, dtype=np.float32)
    rows = [
        NewScore(number.to_bytes(16, "big"), ContinuationScore(logprobs), with_tokens)
        for number in range(first, first + num_rows)
    ]
    cache.store(identity, rows, hits=2 * num_rows, misses=num_rows)
    cache.close()
    change(path, f"UPDATE scores SET created = created - {age_days * DAY} WHERE key >= ?", first)


def change(path: Path, statement: str, number: int) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement, (number.to_bytes(16, "big"),))
    database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two LMs: 600 sums of today, and 400 rows with tokens that are three days old."""
    path = tmp_path / "scores.sqlite"
    fill(path, "llama#[bold]", 0, 600)
    fill(path, "gpt:float32", 600, 400, with_tokens=True, age_days=3)
    return path


def shown(path: Path, capsys: pytest.CaptureFixture, delete_wrong: bool = False) -> dict:
    verify_scores(path, delete_wrong, as_json=True)
    return json.loads(capsys.readouterr().out)


def rows_by_lm(answer: dict) -> dict[str, int]:
    return {use["identity"]: use["rows"] for use in answer["models"]}


# Showing ------------------------------------------------------------------------------------------------


def test_json_says_all_that_is_known(path: Path, capsys: pytest.CaptureFixture) -> None:
    answer = shown(path, capsys)
    assert (answer["file"], answer["rows"], answer["rows_with_tokens"]) == (str(path), 1000, 400)
    assert answer["bytes"] >= path.stat().st_size > 400 * 128 * 4
    assert (answer["deleted_rows"], answer["freed_bytes"]) == (0, 0)
    llama, gpt = answer["models"]
    assert (llama["identity"], llama["rows"], llama["rows_with_tokens"]) == ("llama#[bold]", 600, 0)
    assert (llama["hits"], llama["misses"], llama["hit_share"]) == (1200, 600, pytest.approx(2 / 3))
    assert abs(llama["oldest"] - time.time()) < 60
    assert abs(gpt["newest"] - (time.time() - 3 * DAY)) < 60


def test_the_table_has_a_line_for_each_lm_and_its_name_as_it_is(path: Path, capsys: pytest.CaptureFixture) -> None:
    verify_scores(path, delete_wrong=False, as_json=False)
    printed = capsys.readouterr().out
    assert f"{path}: 0.3 MB, 1000 rows, 400 of them with their tokens, 0 answers" in printed
    assert "llama#[bold]" in printed
    assert "66.7%" in printed
    assert time.strftime("%Y-%m-%d", time.localtime(time.time() - 3 * DAY)) in printed


def test_an_lm_that_was_never_asked_has_no_share(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cache = ScoreCache(tmp_path / "scores.sqlite")
    cache.store("lm", [])
    cache.close()
    (use,) = shown(tmp_path / "scores.sqlite", capsys)["models"]
    assert (use["hit_share"], use["oldest"], use["newest"]) == (None, None, None)
    verify_scores(tmp_path / "scores.sqlite", delete_wrong=False, as_json=False)


def test_showing_changes_nothing(path: Path, capsys: pytest.CaptureFixture) -> None:
    before = path.read_bytes()
    shown(path, capsys)
    assert path.read_bytes() == before


def test_a_file_in_use_by_a_run_can_be_checked_and_its_wrong_rows_deleted(
    path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = ScoreCache(path)
    key = (0).to_bytes(16, "big")
    assert len(run.sums([key])) == 1
    change(path, "UPDATE scores SET num_tokens = 0 WHERE key = ?", 0)
    assert rows_by_lm(shown(path, capsys, delete_wrong=True)) == {"llama#[bold]": 599, "gpt:float32": 400}
    assert run.sums([key]) == {}
    run.store("llama#[bold]", [NewScore(key, ContinuationScore(np.array([-1.0], np.float32)), False)])
    run.close()
    assert rows_by_lm(shown(path, capsys)) == {"llama#[bold]": 600, "gpt:float32": 400}


# Checking -----------------------------------------------------------------------------------------------


def test_a_sound_file_is_verified(path: Path, capsys: pytest.CaptureFixture) -> None:
    verify_scores(path, delete_wrong=False, as_json=True)
    assert "verified: 1000 of 1000 rows are right" in capsys.readouterr().err


def test_wrong_rows_are_counted_with_what_mends_them(path: Path, capsys: pytest.CaptureFixture) -> None:
    change(path, "UPDATE scores SET num_tokens = 0 WHERE key = ?", 5)
    change(path, "UPDATE scores SET sum = -1.5 WHERE key = ?", 700)
    with pytest.raises(RunError) as caught:
        shown(path, capsys)
    message = str(caught.value)
    assert message.startswith(
        f"{path}: 2 of 1000 rows are wrong, the first because its number of tokens is not above 0"
    )
    assert f"`replug verify {path} --delete-wrong`" in message
    assert ScoreCache(path).num_rows() == 1000  # nothing goes unless it is asked for
    answer = shown(path, capsys, delete_wrong=True)
    assert (answer["deleted_rows"], rows_by_lm(answer)) == (2, {"llama#[bold]": 599, "gpt:float32": 399})
    assert answer["freed_bytes"] >= 0
    assert shown(path, capsys)["rows"] == 998


def test_answers_are_checked_shown_and_deleted_too(path: Path, capsys: pytest.CaptureFixture) -> None:
    cache = ScoreCache(path)
    answer = Generated("said", np.array([-1.0], np.float32), None, 1, 3)
    GenerationCache(cache).store("llama#[bold]", {number.to_bytes(16, "big"): answer for number in range(4)})
    cache.close()
    answers = shown(path, capsys)
    assert (answers["rows"], answers["generations"]) == (1000, 4)
    assert [use["generations"] for use in answers["models"]] == [4, 0]
    change(path, "UPDATE generations SET text = x'00' WHERE key = ?", 2)
    with pytest.raises(RunError, match=r"1 of 1004 rows are wrong, the first because its answer is not what was st"):
        shown(path, capsys)
    answers = shown(path, capsys, delete_wrong=True)
    assert (answers["deleted_rows"], answers["rows"], answers["generations"]) == (1, 1000, 3)


def test_deleting_gives_the_space_back(path: Path, capsys: pytest.CaptureFixture) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE scores SET num_tokens = 0 WHERE logprobs IS NOT NULL")
    database.close()
    verify_scores(path, delete_wrong=True, as_json=False)
    assert "deleted 400 rows and freed 0.2 MB" in capsys.readouterr().out


def test_a_damaged_file_is_to_be_removed(path: Path, capsys: pytest.CaptureFixture) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: 5 * 4096] + bytes(len(content) - 5 * 4096))
    for delete_wrong in (False, True):
        with pytest.raises(RunError) as caught:
            shown(path, capsys, delete_wrong)
        assert str(caught.value).startswith(f"{path} is damaged (")
        assert "remove it" in str(caught.value)


# The command line ---------------------------------------------------------------------------------------


def replug_verify(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "replug.commands.cli", "verify", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
    )


def test_the_command_ends_with_0_1_and_2(path: Path) -> None:
    fine = replug_verify(path, "--json")
    assert (fine.returncode, json.loads(fine.stdout)["rows"]) == (0, 1000), fine.stderr
    change(path, "UPDATE scores SET num_tokens = 0 WHERE key = ?", 5)
    wrong = replug_verify(path)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    repaired = replug_verify(path, "--delete-wrong")
    assert (repaired.returncode, "deleted 1 rows" in repaired.stdout) == (0, True), repaired.stderr
    missing = replug_verify(path.parent / "no.sqlite")
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert "no.sqlite does not exist; expected an index, a prepared set, a run directory or a cache" in missing.stderr
    assert not (path.parent / "no.sqlite").exists()
