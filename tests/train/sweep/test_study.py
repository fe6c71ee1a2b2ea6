"""Trials are drawn once, by the space and the seed; their journal takes up where it stopped."""

from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.sweep_space import Choices, Range, Space
from replug.train.sweep.records import TrialResult
from replug.train.sweep.study import Journal, draw_trials

GRID: Space = {"loss.gamma": Choices((0.03, 0.1)), "retriever.train": Choices(("both", "query"))}
SPACE: Space = {"train.lr": Range(1e-5, 1e-3, is_log=True), **GRID}
GOOD = TrialResult(0.65, 20, 0.02, 0.9, 40, 1.5)


def test_a_grid_is_all_of_it_in_the_order_typed() -> None:
    assert [trial.settings for trial in draw_trials(GRID, None, 0)] == [
        {"loss.gamma": gamma, "retriever.train": side} for gamma in (0.03, 0.1) for side in ("both", "query")
    ]


def test_samples_follow_from_the_seed_alone_and_more_of_them_begin_alike() -> None:
    drawn = draw_trials(SPACE, 5, 7)
    assert drawn == draw_trials(SPACE, 8, 7)[:5] != draw_trials(SPACE, 5, 8)
    assert all(1e-5 <= trial.settings["train.lr"] <= 1e-3 for trial in drawn)
    assert [trial.name for trial in drawn[:2]] == ["trial-0000", "trial-0001"]


def test_a_range_has_no_grid() -> None:
    with pytest.raises(UserError, match=r"train\.lr is a range.*--samples N"):
        draw_trials(SPACE, None, 0)


def test_a_journal_goes_on_with_what_has_ended(tmp_path: Path) -> None:
    path, trials = tmp_path / "study.jsonl", draw_trials(SPACE, 4, 0)
    journal = Journal(path, SPACE, trials)
    assert journal.results() == {}
    failed = TrialResult(None, None, None, None, 0, 0.0, "the loss is not finite")
    journal.end(2, GOOD)
    journal.end(0, failed)
    assert Journal(path, SPACE, trials).results() == {2: GOOD, 0: failed}


def test_what_a_kill_left_of_a_line_is_no_result(tmp_path: Path) -> None:
    path, trials = tmp_path / "study.jsonl", draw_trials(SPACE, 4, 0)
    journal = Journal(path, SPACE, trials)
    journal.end(2, GOOD)
    whole = path.read_bytes()
    journal.end(1, GOOD)
    path.write_bytes(path.read_bytes()[: len(whole) + 40])
    again = Journal(path, SPACE, trials)
    assert again.results() == {2: GOOD}
    again.end(1, GOOD)
    assert Journal(path, SPACE, trials).results() == {2: GOOD, 1: GOOD}


def test_a_journal_of_other_trials_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "study.jsonl", SPACE, draw_trials(SPACE, 4, 0)).end(1, GOOD)
    with pytest.raises(UserError, match="is of other trials; give another --out"):
        Journal(tmp_path / "study.jsonl", SPACE, draw_trials(SPACE, 4, 1)).results()


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    Journal(path, GRID, draw_trials(GRID, None, 0)).end(0, GOOD)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{torn", *lines[1:]]) + "\n")
    with pytest.raises(UserError, match=r"study\.jsonl is damaged"):
        Journal(path, GRID, draw_trials(GRID, None, 0))
