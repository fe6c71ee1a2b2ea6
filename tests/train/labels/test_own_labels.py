"""`train.labels=auto`: one command labels a set and trains on its labels, as configs/own_data.yaml does."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import ROOT, CommandLine, start_process, wait_for

STAND_INS = ("retriever.path=stand_in", "lm.path=stand_in")


def typed(folder: Path, replug: CommandLine, *others: str) -> list[str]:
    """The command that `replug example` prints, with stand-ins for its models."""
    words = shlex.split(replug("example", folder / "mine").output.splitlines()[-1])[2:]
    models = ("retriever.path", "lm.path")
    return [words[0], str(ROOT / words[1]), *(word for word in words[2:] if not word.startswith(models)), *others]


def test_a_set_without_development_texts_is_refused_before_anything_is_scored(
    tmp_path: Path, replug: CommandLine
) -> None:
    command = [word for word in typed(tmp_path, replug, *STAND_INS) if not word.startswith("data.dev")]
    ended = replug(*command)
    assert ended.status == 2 and "has no development texts; prepare a set with data.num_dev" in ended.errors
    assert not (tmp_path / "mine/run/labels").exists()


def test_a_sweep_wants_labels_that_are_there(tmp_path: Path, replug: CommandLine) -> None:
    command = typed(tmp_path, replug, *STAND_INS)
    ended = replug("sweep", *command[1:], "--out", tmp_path / "sweep", "train.lr=[1e-5,1e-4]")
    assert ended.status == 2 and "train.labels is auto; a sweep trains on what `replug label` wrote" in ended.errors


@pytest.mark.slow
def test_the_examples_command_labels_trains_and_measures(tmp_path: Path, replug: CommandLine) -> None:
    command, run = typed(tmp_path, replug, *STAND_INS), tmp_path / "mine/run"
    first = wait_for(start_process(*command))
    assert "240 pairs were scored" in first.replace(",", "") or "pairs were scored" in first
    assert json.loads((run / "labels/labels.json").read_text())["counts"] == {"queries": 16, "dev": 4}
    results = json.loads((run / "results.json").read_text())
    assert results["labels"]["best"]["bpb"] > 0
    again = wait_for(start_process(*command))  # shows it
    assert "pairs were scored" not in again and "holds a finished run" in again
    shutil.rmtree(run / "labels")
    assert "holds no finished labels" in wait_for(start_process(*command), status=2)
