"""`replug doctor` of a cache of scores: what it shows, and the statuses it ends with."""

import json
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from replug.commands.doctor_folder import verify_scores
from replug.models.black_box_lm import ContinuationScore, sum_of
from replug.models.score_cache import ScoreCache
from tests.support.command_line import CommandLine

DAY = 86_400


def fill(path: Path, identity: str, first: int, num_rows: int, with_tokens: bool = False, age_days: float = 0) -> None:
    """Rows with keys of their own."""
    cache = ScoreCache(path)
    score = ContinuationScore(-np.random.default_rng(0).random(128, dtype=np.float32))
    keys = [number.to_bytes(16, "big") for number in range(first, first + num_rows)]
    cache.store(identity, dict.fromkeys(keys, score if with_tokens else sum_of(score)))
    cache.close()
    change(path, f"UPDATE cached SET created = created - {age_days * DAY} WHERE key >= ?", first)


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


def shown(path: Path, capsys: pytest.CaptureFixture) -> dict:
    verify_scores(path, as_json=True)
    return json.loads(capsys.readouterr().out)


# Showing ------------------------------------------------------------------------------------------------


def test_json_says_all_that_is_known(path: Path, capsys: pytest.CaptureFixture) -> None:
    answer = shown(path, capsys)
    assert (answer["file"], answer["rows"], answer["rows_with_tokens"]) == (str(path), 1000, 400)
    assert answer["bytes"] >= path.stat().st_size > 400 * 128 * 4
    llama, gpt = answer["models"]
    assert (llama["identity"], llama["rows"], llama["rows_with_tokens"]) == ("llama#[bold]", 600, 0)
    assert abs(llama["oldest"] - time.time()) < 60
    assert abs(gpt["newest"] - (time.time() - 3 * DAY)) < 60


# Checking -----------------------------------------------------------------------------------------------


# The command line ---------------------------------------------------------------------------------------


def test_the_command_ends_with_0_1_and_2(path: Path, replug: CommandLine) -> None:
    fine = replug("doctor", path, "--json")
    assert (fine.status, json.loads(fine.output)["rows"]) == (0, 1000), fine.errors
    whole = path.read_bytes()
    path.write_bytes(whole[: 5 * 4096] + bytes(len(whole) - 5 * 4096))
    wrong = replug("doctor", path)
    assert (wrong.status, wrong.output, wrong.errors.count("\n")) == (1, "", 1)
    missing = replug("doctor", path.parent / "no.sqlite")
    assert (missing.status, missing.output, missing.errors.count("\n")) == (2, "", 1)
    assert "no.sqlite does not exist; expected a YAML file, an index" in missing.errors
    assert not (path.parent / "no.sqlite").exists()
