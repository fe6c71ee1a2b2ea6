"""Every command that writes a folder, where another process is writing it, after kill -9, and again."""

import json
import os
from pathlib import Path

import pytest

from replug.data.folder import LOCK, sole_writer
from replug.train.run_dir import RunDirectory
from tests.support.command_line import ROOT, CommandLine
from tests.support.outcome_folders import made_up_rows, write_evaluation

DEBUG = str(ROOT / "configs/debug.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
    write_evaluation(tmp_path / "outcomes", made_up_rows(60))
    return tmp_path


WRITERS = {  # what is typed, and the folder (or file) that it writes
    "train": (["train", DEBUG, "run_dir={}/run"], "run"),
    "evaluate": (
        ["evaluate", f"{ROOT}/configs/eval_lm.yaml", "out={}/out", "retriever.path=stand_in", "lm.path=stand_in"],
        "out",
    ),
    "index": (["prepare", DEBUG, "--index", "run_dir={}/run"], "run"),
    "prepare": (["prepare", DEBUG, "run_dir={}/run"], "run/data"),
    "report": (["report", "{}/finished"], "finished"),
    "report of policies": (["report", "{}/outcomes", "--policies", "{}/page"], "page"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_another_process_writes_is_refused_by_its_name(
    name: str, replug: CommandLine, folder: Path
) -> None:
    said, written = WRITERS[name]
    if name == "report":
        finished = RunDirectory(folder / "finished").folder
        finished.claim({})
        finished.finish([])
    with sole_writer(folder / written):
        before = _content(folder / written)
        ended = replug(*(word.format(folder) if "{}" in word else word for word in said))
        assert _content(folder / written) == before
    assert ended.status == 2, ended.printed
    assert f"{folder / written} is being written by process {os.getpid()} on {os.uname().nodename}" in ended.errors
    assert "Traceback" not in ended.printed


def test_what_a_killed_process_leaves_does_not_stop_the_next_one(replug: CommandLine, folder: Path) -> None:
    (folder / "run/data").mkdir(parents=True)
    (folder / "run/data" / LOCK).write_text(json.dumps({"pid": 1, "host": "here"}))
    for _ in range(2):  # and again, on what is finished
        ended = replug(*(word.format(folder) if "{}" in word else word for word in WRITERS["prepare"][0]))
        assert ended.status == 0, ended.printed
    assert not (folder / "run/data" / LOCK).exists()


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
