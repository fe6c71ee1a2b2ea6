"""Every command that writes a folder, where another process is writing it, after kill -9, and again."""

import json
import os
import signal
from pathlib import Path

import pytest

from replug.data.folder import LOCK, sole_writer
from replug.train.run_dir import RunDirectory
from tests.support.command_line import ROOT, CommandLine, arguments, start, start_process, wait_for
from tests.support.evaluating import on_run, typed, wait_for_lines
from tests.support.outcome_folders import made_up_rows, write_evaluation
from tests.support.runs import wait_for_step, what_must_be_equal

DEBUG = str(ROOT / "configs/debug.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
    write_evaluation(tmp_path / "outcomes", made_up_rows(40))
    return tmp_path


WRITERS = {  # what is typed, and the folder (or file) that it writes
    "train": (["train", DEBUG, "run_dir={}/run"], "run"),
    "evaluate a run": (["evaluate", DEBUG, "run_dir={}/run"], "run"),
    "evaluate": (
        ["evaluate", f"{ROOT}/configs/eval_lm.yaml", "out={}/out", "retriever.path=stand_in", "lm.path=stand_in"],
        "out",
    ),
    "index": (["prepare", DEBUG, "--index", "run_dir={}/run"], "run"),
    "prepare": (["prepare", DEBUG, "run_dir={}/run"], "run/data"),
    "prepare elsewhere": (["prepare", DEBUG, "run_dir={}/run", "data.out={}/set"], "set"),
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


# Whole commands, each in a process of its own -----------------------------------------------------------------


@pytest.mark.slow
def test_two_evaluations_of_one_folder_killed_and_resumed_measure_every_example_once(
    quiet_run: Path, replug: CommandLine, tmp_path: Path
) -> None:
    settings = [*on_run(quiet_run), "methods=[none,random]", "k=2", "lm.path=stand_in:0.02"]
    whole = replug(*typed("lm", f"out={tmp_path / 'whole'}", *settings))
    assert whole.status == 0, whole.printed
    out = tmp_path / "out"
    first = start_process(*typed("lm", f"out={out}", *settings))
    wait_for_lines(first, out / "outcomes.jsonl", 5)
    os.kill(first.pid, signal.SIGSTOP)  # else it may have ended before the second has imported what it needs
    second = start_process(*typed("lm", f"out={out}", *settings))
    assert f"{out} is being written by process {first.pid}" in wait_for(second, status=2)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    again = replug(*typed("lm", f"out={out}", *settings))
    assert again.status == 0, again.printed
    ids = [json.loads(line)["id"] for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 40
    assert (out / "results.json").read_text() == (tmp_path / "whole/results.json").read_text()


@pytest.mark.slow
def test_two_trainings_in_one_folder_killed_and_resumed_have_the_losses_of_a_quiet_one(
    quiet_run: Path, finish, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = start(run)
    wait_for_step(run, 9, first)
    os.kill(first.pid, signal.SIGSTOP)
    second = start_process(*arguments(run, (), "train", "debug"))
    assert f"{run} is being written by process {first.pid}" in wait_for(second, status=2)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    finish(run)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()
