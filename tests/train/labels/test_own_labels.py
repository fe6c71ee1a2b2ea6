"""`train.labels=auto`: one command labels a set and trains on its labels."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from replug.data.labels import Labels
from tests.support.command_line import ROOT, CommandLine, start_process, wait_for

STAND_INS = ("retriever.path=stand_in", "lm.path=stand_in")
CONFIG = ROOT / "configs/own_data.yaml"
OWN = ("train.epochs=2", "train.batch_size=4", "label.dense=3", "label.bm25=1")


def typed(folder: Path, replug: CommandLine, *others: str) -> list[str]:
    """The command that `replug prepare --example` prints, with stand-ins for its models."""
    words = shlex.split(replug("prepare", "--example", folder / "mine").output.splitlines()[-1])[2:]
    given = ("retriever.path", "lm.path")
    kept = [word for word in words[2:] if not word.startswith(given)]
    return [words[0], str(CONFIG), *kept, *STAND_INS, *OWN, *others]


@pytest.mark.slow
def test_a_set_without_development_texts_is_refused_before_anything_is_scored(
    tmp_path: Path, replug: CommandLine
) -> None:
    command = [word for word in typed(tmp_path, replug) if not word.startswith("data.dev")]
    ended = replug(*command)
    assert ended.status == 2 and "has no development texts; prepare a set with data.num_dev" in ended.errors
    assert not (tmp_path / "mine/run/labels").exists()


def test_a_labelling_alone_has_no_tuned_queries_but_those_that_are_named(tmp_path: Path, replug: CommandLine) -> None:
    command = typed(tmp_path, replug)
    ended = replug("prepare", *command[1:], "--labels", tmp_path / "labels")
    assert ended.status == 2 and "label.tuned is 8; expected label.tuned_path" in ended.errors
    assert not (tmp_path / "labels").exists()


@pytest.mark.slow
def test_the_examples_command_labels_trains_and_measures(tmp_path: Path, replug: CommandLine) -> None:
    command, run = typed(tmp_path, replug, "label.tuned=2"), tmp_path / "mine/run"
    printed = wait_for(start_process(*command))
    scored = [int(count) for count in re.findall(r"(\d+) pairs were scored", printed)]
    assert scored[0] == 84 and 0 < scored[1] <= 40  # 4 candidates of 20 texts, and none of 4; then what is new of 2
    first, second = Labels(run / "first/labels"), Labels(run / "labels")
    assert (first.origin.num_candidates, second.origin.num_candidates) == (4, 6)
    assert len(re.findall(r"embedding index v0: .* took", printed)) == 1 and not list(run.glob("**/labels/index"))
    assert second.origin.tuned_queries and [row["given_by"][3:5] for row in second.rows("dev")] == [["tuned"] * 2] * 4
    assert json.loads((run / "labels/manifest.json").read_text())["counts"] == {"queries": 16, "dev": 4}
    results = json.loads((run / "results.json").read_text())
    assert results["weights"]["best"]["bpb"] > 0
    again = replug(*command)  # shows it
    assert again.status == 0 and "pairs were scored" not in again.printed, again.printed
    shutil.rmtree(run / "labels")
    assert "holds no finished labels" in replug(*command).errors
