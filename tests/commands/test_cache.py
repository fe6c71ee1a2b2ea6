"""`replug cache`: what it shows, what it finds, what it deletes, and the statuses it ends with."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from replug.commands.cache import Prune, run_cache
from replug.configs.errors import RunError, UserError
from replug.models.black_box_lm import ContinuationScore
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


def shown(
    path: Path,
    capsys: pytest.CaptureFixture,
    prune: Prune | None = None,
    verify: bool = False,
    prune_bad: bool = False,
) -> dict:
    run_cache(path, prune or Prune(), verify, prune_bad, as_json=True)
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
    run_cache(path, Prune(), verify=False, prune_bad=False, as_json=False)
    printed = capsys.readouterr().out
    assert f"{path}: 0.3 MB, 1000 rows, 400 of them with their tokens" in printed
    assert "llama#[bold]" in printed
    assert "66.7%" in printed
    assert time.strftime("%Y-%m-%d", time.localtime(time.time() - 3 * DAY)) in printed


def test_an_lm_that_was_never_asked_has_no_share(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cache = ScoreCache(tmp_path / "scores.sqlite")
    cache.store("lm", [])
    cache.close()
    (use,) = shown(tmp_path / "scores.sqlite", capsys)["models"]
    assert (use["hit_share"], use["oldest"], use["newest"]) == (None, None, None)
    run_cache(tmp_path / "scores.sqlite", Prune(), verify=False, prune_bad=False, as_json=False)


def test_showing_changes_nothing(path: Path, capsys: pytest.CaptureFixture) -> None:
    before = path.read_bytes()
    shown(path, capsys)
    shown(path, capsys, verify=True)
    assert path.read_bytes() == before


def test_a_file_in_use_by_a_run_can_be_shown_checked_and_pruned(path: Path, capsys: pytest.CaptureFixture) -> None:
    run = ScoreCache(path)
    key = (0).to_bytes(16, "big")
    assert len(run.sums([key])) == 1
    assert rows_by_lm(shown(path, capsys, Prune("llama"), verify=True)) == {"gpt:float32": 400}
    assert run.sums([key]) == {}
    run.store("llama#[bold]", [NewScore(key, ContinuationScore(np.array([-1.0], np.float32)), False)])
    run.close()
    assert rows_by_lm(shown(path, capsys)) == {"gpt:float32": 400, "llama#[bold]": 1}


# Checking -----------------------------------------------------------------------------------------------


def test_a_sound_file_is_verified(path: Path, capsys: pytest.CaptureFixture) -> None:
    run_cache(path, Prune(), verify=True, prune_bad=False, as_json=True)
    assert "verified: 1000 of 1000 rows are right" in capsys.readouterr().err


def test_wrong_rows_are_counted_with_what_mends_them(path: Path, capsys: pytest.CaptureFixture) -> None:
    change(path, "UPDATE scores SET num_tokens = 0 WHERE key = ?", 5)
    change(path, "UPDATE scores SET sum = -1.5 WHERE key = ?", 700)
    with pytest.raises(RunError) as caught:
        shown(path, capsys, verify=True)
    message = str(caught.value)
    assert message.startswith(
        f"{path}: 2 of 1000 rows are wrong, the first because its number of tokens is not above 0"
    )
    assert f"`replug cache {path} --prune-bad`" in message
    assert rows_by_lm(shown(path, capsys)) == {"llama#[bold]": 600, "gpt:float32": 400}
    answer = shown(path, capsys, prune_bad=True)
    assert (answer["deleted_rows"], rows_by_lm(answer)) == (2, {"llama#[bold]": 599, "gpt:float32": 399})
    assert shown(path, capsys, verify=True)["rows"] == 998


def test_nothing_is_deleted_from_a_file_with_wrong_rows_unless_it_is_asked_for(
    path: Path, capsys: pytest.CaptureFixture
) -> None:
    change(path, "UPDATE scores SET num_tokens = 0 WHERE key = ?", 5)
    with pytest.raises(RunError):
        shown(path, capsys, Prune("gpt"), verify=True)
    assert shown(path, capsys)["rows"] == 1000


def test_a_damaged_file_is_to_be_removed(path: Path, capsys: pytest.CaptureFixture) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: 5 * 4096] + bytes(len(content) - 5 * 4096))
    for verify, prune_bad in ((True, False), (False, True)):
        with pytest.raises(RunError) as caught:
            shown(path, capsys, verify=verify, prune_bad=prune_bad)
        assert str(caught.value).startswith(f"{path} is damaged (")
        assert "remove it" in str(caught.value)
    with pytest.raises(RunError, match="--verify"):
        shown(path, capsys)


# Deleting -----------------------------------------------------------------------------------------------


def test_an_lms_rows_are_deleted_and_the_space_is_free(path: Path, capsys: pytest.CaptureFixture) -> None:
    before = shown(path, capsys)["bytes"]
    answer = shown(path, capsys, Prune("gpt"))
    assert (answer["deleted_rows"], rows_by_lm(answer)) == (400, {"llama#[bold]": 600})
    assert answer["freed_bytes"] == before - answer["bytes"] > 400 * 128 * 4
    assert answer["bytes"] == path.stat().st_size


def test_old_rows_are_deleted(path: Path, capsys: pytest.CaptureFixture) -> None:
    assert rows_by_lm(shown(path, capsys, Prune(older_than_days=3.5))) == {"llama#[bold]": 600, "gpt:float32": 400}
    assert rows_by_lm(shown(path, capsys, Prune(older_than_days=2.5))) == {"llama#[bold]": 600}
    answer = shown(path, capsys, Prune(older_than_days=0))
    assert (answer["deleted_rows"], answer["models"]) == (600, [])


def test_prefix_and_age_together_delete_what_both_name(path: Path, capsys: pytest.CaptureFixture) -> None:
    assert shown(path, capsys, Prune("llama", 1))["deleted_rows"] == 0
    assert rows_by_lm(shown(path, capsys, Prune("llama", 0))) == {"gpt:float32": 400}


def test_deleting_says_what_was_freed(path: Path, capsys: pytest.CaptureFixture) -> None:
    run_cache(path, Prune("gpt"), verify=False, prune_bad=False, as_json=False)
    assert "deleted 400 rows and freed 0.2 MB" in capsys.readouterr().out


def test_an_unknown_lm_is_named_with_the_known_ones(path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError, match=r"begins with 'bloom'; it holds llama#\[bold\], gpt:float32"):
        shown(path, capsys, Prune("bloom"))


# The command line ---------------------------------------------------------------------------------------


def replug_cache(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "replug.commands.cli", "cache", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
    )


def test_the_command_ends_with_0_1_and_2(path: Path) -> None:
    fine = replug_cache(path, "--verify", "--json")
    assert (fine.returncode, json.loads(fine.stdout)["rows"]) == (0, 1000), fine.stderr
    change(path, "UPDATE scores SET num_tokens = 0 WHERE key = ?", 5)
    wrong = replug_cache(path, "--verify")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    pruned = replug_cache(path, "--prune-bad", "--prune-lm", "gpt", "--older-than", "2")
    assert (pruned.returncode, "deleted 401 rows" in pruned.stdout) == (0, True), pruned.stderr
    missing = replug_cache(path.parent / "no.sqlite")
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert "no.sqlite does not exist; expected a cache of scores" in missing.stderr
    assert not (path.parent / "no.sqlite").exists()
