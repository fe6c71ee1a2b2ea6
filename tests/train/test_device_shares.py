"""Who worked where, over a training that is interrupted: nothing is lost, and nothing is counted twice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replug.cluster.gpus import Busy, DeviceUse
from replug.data.datamodule import Position
from replug.train.report import device_shares
from replug.train.run_dir import RunDirectory
from replug.train.step_metrics import DeviceShares, JsonLinesLogger

RANKS = [("a:0",), ("b:0",)]


class Logs:
    """Remembers what is logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


def train(run: RunDirectory, steps: range, state: dict | None = None, max_steps: int = 250) -> tuple[dict, Logs]:
    """Steps of 2 seconds, 1 of them training and half of one encoding; GPU a:1 scores for 1.5 of them."""
    use, logs = DeviceUse(), Logs()
    use.note("embed", Busy(9.0, ("a:1",)))  # the first index
    shares = DeviceShares(run.device_use, max_steps, lambda: RANKS, use)
    times = {"time/train_seconds": 1.0, "time/retrieve_seconds": 0.5, "time/step_seconds": 2.0, "train/loss": 3.0}
    trainer: Any = SimpleNamespace(
        callback_metrics=times, max_steps=max_steps, loggers=[JsonLinesLogger(run.metrics), logs]
    )
    if state is not None:
        shares.load_state_dict(state)
    shares.on_train_start(trainer, SimpleNamespace())  # type: ignore[arg-type]
    for step in steps:
        use.note("score", Busy(1.5, ("a:1",)))
        shares.on_train_batch_end(trainer, SimpleNamespace(), None, Position(step), step)  # type: ignore[arg-type]
    return shares.state_dict(), logs


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_row_is_of_some_steps_and_the_last_row_of_what_is_left(run: RunDirectory) -> None:
    train(run, range(249), max_steps=249)
    rows = run.read_device_use()
    assert [row["step"] for row in rows] == [*range(1, 248, 2), 248]
    assert rows[0] == {
        "step": 1,
        "seconds": 4.0,
        "busy": {"a:1": {"score": 3.0}, "a:0": {"train": 3.0}, "b:0": {"train": 2.0}},
    }
    assert rows[-1]["seconds"] == 2.0


def test_shares_go_to_loggers_but_not_among_the_rows_of_the_metrics(run: RunDirectory) -> None:
    _, logs = train(run, range(2))
    assert logs.rows == [(1, {"devices/a:1/score": 0.75, "devices/a:0/train": 0.75, "devices/b:0/train": 0.5})]
    assert not run.metrics.exists()


def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(run: RunDirectory, tmp_path: Path) -> None:
    state, _ = train(run, range(5))  # a checkpoint in the middle of a row
    train(run, range(5, 9), state)  # killed after it
    run.forget_after(5)
    train(run, range(5, 12), state)
    whole = RunDirectory(tmp_path / "whole")
    whole.path.mkdir()
    train(whole, range(12))
    assert run.read_device_use() == whole.read_device_use()


def test_totals_are_of_all_steps_and_what_is_left_is_idle(run: RunDirectory) -> None:
    train(run, range(4))
    none = {"score": 0.0, "embed": 0.0, "search": 0.0, "train": 0.0}
    assert device_shares(run.read_device_use()) == {
        "a:0": {**none, "train": 0.75, "idle": 0.25},
        "a:1": {**none, "score": 0.75, "idle": 0.25},
        "b:0": {**none, "train": 0.5, "idle": 0.5},
    }


CROWDED = {"step": 1, "seconds": 4.0, "busy": {"a:10": {"score": 3.0, "embed": 2.0}, "a:2": {"train": 1.0}}}


def test_shares_of_roles_that_take_turns_may_add_up_above_one_and_nothing_is_idle_then() -> None:
    shares = device_shares([CROWDED])
    assert list(shares) == ["a:2", "a:10"]
    assert shares["a:10"] == {"score": 0.75, "embed": 0.5, "search": 0.0, "train": 0.0, "idle": 0.0}
