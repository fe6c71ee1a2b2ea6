"""A run that begins on labels and goes on live: batches before and after the hand-over, and bit-exact resuming."""

import json
import signal
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.data.labels import Labels
from tests.support.command_line import ROOT, start, wait_for
from tests.support.runs import metrics, wait_for_step, what_must_be_equal

KEYS = (
    *("train.labels=auto", "label.dense=8", "label.random=2", "train.label_steps=8", "train.max_steps=16"),
    *("data.num_queries=60", "data.num_dev=12", "data.num_heldout=10"),
)


@pytest.mark.slow
def test_the_index_is_of_the_weights_at_the_hand_over_and_a_killed_run_has_the_same_losses(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    wait_for(start(whole, *KEYS))
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(16))
    assert not any("index/version" in row for row in rows[:8])
    # Adopted: the hand-over's index at step 8, and a refresh of step 12, three steps later.
    assert [row["index/live_version"] for row in rows] == [0] * 8 + [1] * 7 + [2]
    assert [row["index/live_step"] for row in rows[7:9]] == [0, 8]
    assert [row["pipeline/query_age_steps"] for row in rows[8:12]] == [0, 1, 2, 2]
    looks = {row["dev/step"]: row["dev/bpb"] for row in rows}
    assert set(looks) == {0, 8, 12}
    weights = json.loads((whole / "results.json").read_text())["weights"]
    assert weights["steps"] == 16 and weights["best"]["bpb"] <= min(looks.values()) + 1e-6
    assert Labels(whole / "labels").origin.num_candidates == 10

    for step in (5, 10):  # on labels; live, from the checkpoint at the hand-over
        killed = start(run, *KEYS, "lm.path=stand_in:0.01")
        wait_for_step(run, step, killed)
        killed.kill()
        wait_for(killed, status=-signal.SIGKILL)
    assert "resuming at step" in wait_for(start(run, *KEYS, "lm.path=stand_in:0.01"))
    assert what_must_be_equal(run) == what_must_be_equal(whole)
    assert json.loads((run / "results.json").read_text())["weights"] == weights


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("train.label_steps=8", "train.epochs=2"), r"train\.epochs is set with train\.label_steps"),
        (("train.label_steps=16",), r"train\.label_steps is 16 of train\.max_steps=16; expected fewer"),
        (("train.label_steps=8", "train.patience=2"), r"train\.patience is set with train\.label_steps"),
        (("train.label_steps=8", "train.labels=null"), r"train\.label_steps is set, but train\.labels is not"),
    ],
)
def test_keys_that_leave_open_when_live_batches_begin_are_refused(keys: tuple[str, ...], says: str) -> None:
    given = ["run_dir=x", "train.labels=x", "train.max_steps=16"]
    with pytest.raises(UserError, match=says):
        load_config(ROOT / "configs/debug.yaml", [*given, *keys])
