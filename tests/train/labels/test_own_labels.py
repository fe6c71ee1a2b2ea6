"""`train.labels=auto`: one command labels a set and trains on its labels."""

import json
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.data.labels import Labels
from tests.support.command_line import ROOT, CommandLine, start, wait_for
from tests.support.runs import metrics, wait_for_step, what_must_be_equal

STAND_INS = ("retriever.path=stand_in", "lm.path=stand_in")
CONFIG = ROOT / "configs/own_data.yaml"
OWN = ("data.questions=null", "train.epochs=2", "train.batch_size=4", "label.dense=3", "label.bm25=1")


def typed(folder: Path, replug: CommandLine, *others: str) -> list[str]:
    """The command that `replug prepare --example` prints, with stand-ins for its models."""
    words = shlex.split(replug("prepare", "--example", folder / "mine").output.splitlines()[-1])[2:]
    given = ("retriever.path", "lm.path")
    kept = [word for word in words[2:] if not word.startswith(given)]
    return [words[0], str(CONFIG), *kept, *STAND_INS, *OWN, *others]


def test_a_set_without_development_texts_is_refused_before_anything_is_cut(tmp_path: Path, replug: CommandLine) -> None:
    command = [word for word in typed(tmp_path, replug) if not word.startswith("data.dev")]
    ended = replug(*command)
    assert ended.status == 2 and "data.dev is missing; expected a file, since train.patience chooses" in ended.errors
    assert not (tmp_path / "mine/run").exists()


@pytest.mark.slow
def test_the_examples_command_labels_trains_and_measures(tmp_path: Path, replug: CommandLine) -> None:
    command, run = typed(tmp_path, replug), tmp_path / "mine/run"
    ended = replug(*command)
    assert ended.status == 0, ended.printed
    printed = ended.printed
    scored = [int(count) for count in re.findall(r"(\d+) pairs were scored", printed)]
    assert scored[0] == 80  # 4 candidates of 20 texts
    assert Labels(run / "labels").origin.num_candidates == 4
    stages = re.findall(r"^stage \d of 5, .*?(?=, about|$)", printed, re.MULTILINE)
    names = ["index", "labels", "training", "tuned retriever's search", "held-out texts"]
    assert stages == [f"stage {number} of 5, {name}" for number, name in enumerate(names, 1)]
    assert printed.count("report: ") == 1 and not list(run.glob("**/labels/index"))
    assert json.loads((run / "labels/manifest.json").read_text())["counts"] == {"queries": 16, "dev": 4}
    results = json.loads((run / "results.json").read_text())
    assert results["weights"]["best"]["bpb"] > 0
    again = replug(*command)  # shows it
    assert again.status == 0 and "pairs were scored" not in again.printed, again.printed
    shutil.rmtree(run / "labels")
    assert "holds no finished set of labels" in replug(*command).errors


# Labels, then live ---------------------------------------------------------------------------------------------


TO_LIVE = (
    *("train.labels=auto", "label.dense=8", "label.random=2", "train.label_steps=8", "train.max_steps=16"),
    *("data.num_queries=60", "data.num_dev=12", "data.num_heldout=10"),
)


@pytest.mark.slow
def test_the_index_is_of_the_weights_at_the_hand_over_and_a_killed_run_has_the_same_losses(
    tmp_path: Path, finish: Callable[..., str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    finish(whole, *TO_LIVE)
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(16))
    assert not any("index/version" in row for row in rows[:8])
    # Adopted: the hand-over's index at step 8, and a refresh of step 12, three steps later.
    assert [row["index/live_version"] for row in rows] == [0] * 8 + [1] * 7 + [2]
    assert [row["index/live_step"] for row in rows[7:9]] == [0, 8]
    assert [row["pipeline/query_age_steps"] for row in rows[8:12]] == [0, 1, 2, 2]
    measured = {row["dev/step"]: row["dev/bpb"] for row in rows}
    assert set(measured) == {0, 8, 12}
    weights = json.loads((whole / "results.json").read_text())["weights"]
    assert weights["steps"] == 16 and weights["best"]["bpb"] <= min(measured.values()) + 1e-6
    assert Labels(whole / "labels").origin.num_candidates == 10

    killed = start(run, *TO_LIVE, "lm.path=stand_in:0.01")
    wait_for_step(run, 10, killed)  # live, from the checkpoint at the hand-over
    killed.kill()
    wait_for(killed, status=-signal.SIGKILL)
    assert "resuming at step" in finish(run, *TO_LIVE, "lm.path=stand_in:0.01")
    assert what_must_be_equal(run) == what_must_be_equal(whole)
    assert json.loads((run / "results.json").read_text())["weights"] == weights
