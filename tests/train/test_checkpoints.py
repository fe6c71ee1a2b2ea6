"""Checkpoints as they lie in a run directory: torn ones, the last few, and the best apart."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from replug.config.errors import RunError, UserError
from replug.data.files import file_sha256
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.train.run_dir import CheckpointMark, RunDirectory
from tests.support.command_line import start
from tests.support.index_versions import begin, write_corpus
from tests.support.runs import metrics, wait_for_step, what_must_be_equal


def checkpoint(run: RunDirectory, step: int) -> Path:
    path = run.checkpoint(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not run.index.exists():
        write_corpus(run.data / "documents")
        begin(VersionStore(run.index), version=0)
    path.write_bytes(bytes([step]) * 100)
    run.mark(CheckpointMark(path, step, (0,), file_sha256(path)))
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_the_newest_whole_checkpoint_is_taken_and_a_torn_one_is_named(run, capsys):
    checkpoint(run, 4)
    torn = checkpoint(run, 8)
    torn.write_bytes(torn.read_bytes()[:50])
    newest = run.newest_checkpoint()
    assert newest is not None
    assert newest.step == 4
    assert f"{torn} is torn" in capsys.readouterr().err
    run.forget_after(4)
    assert [mark.step for mark in run.checkpoint_marks()] == [4]


def test_a_checkpoint_that_is_gone_is_passed_over_too(run):
    checkpoint(run, 4)
    checkpoint(run, 8).unlink()
    newest = run.newest_checkpoint()
    assert newest is not None
    assert newest.step == 4


def test_a_checkpoint_whose_index_version_is_gone_is_passed_over_unless_only_its_weights_are_wanted(run, capsys):
    """As two runs in one folder left it, each of which removed the other's versions."""
    checkpoint(run, 4)
    checkpoint(run, 8)
    shutil.rmtree(run.index / "v000000")
    begin(VersionStore(run.index), version=0)
    newest = checkpoint(run, 12)
    run.mark(CheckpointMark(newest, 12, (0, 1), file_sha256(newest)))
    found = run.newest_checkpoint()
    assert found is not None and found.step == 8
    assert f"{newest} needs index version 1, which is gone from {run.index}" in capsys.readouterr().err
    weights = run.newest_checkpoint(with_index=False)
    assert weights is not None and weights.step == 12


def test_a_checkpoint_of_another_version_is_refused_by_name(run):
    mark = checkpoint(run, 4).with_suffix(".json")
    mark.write_text(json.dumps({"step": 4, "versions": [0], "sha256": "of an older version"}))
    with pytest.raises(UserError, match=r"step-000004.json is of another version of replug; end that run with it"):
        run.newest_checkpoint()


def test_where_no_checkpoint_is_whole_the_run_does_not_silently_begin_anew(run):
    checkpoint(run, 4).write_bytes(b"torn")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole; bring one back, or remove that folder"):
        run.newest_checkpoint()


def test_without_checkpoints_a_run_begins_at_its_beginning(run):
    assert run.newest_checkpoint() is None
    run.checkpoints.mkdir()
    run.checkpoint(4).write_bytes(b"without its mark")
    assert run.newest_checkpoint() is None


def test_only_a_better_version_replaces_the_best(run, tmp_path):
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "model.safetensors").write_bytes(b"first")
    run.keep_best(encoder, 1.25, step=10)
    assert run.best_bpb() == 1.25
    (encoder / "model.safetensors").write_bytes(b"second")
    run.keep_best(encoder, 1.125, step=20)
    assert (run.best / "model.safetensors").read_bytes() == b"second"
    assert json.loads((tmp_path / "best.json").read_text()) == {"heldout_bpb": 1.125, "step": 20}
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_a_run_keeps_the_retriever_that_was_best_on_held_out_text(quiet_run):
    rows, best = metrics(quiet_run), json.loads((quiet_run / "best.json").read_text())
    assert best["heldout_bpb"] == pytest.approx(min(row["heldout/bpb"] for row in rows))
    at_best = next(row for row in rows if row["heldout/bpb"] == min(row["heldout/bpb"] for row in rows))
    assert best["step"] == at_best["index/live_step"]
    assert Encoder(str(quiet_run / "best")).dim == Encoder(str(quiet_run / "retriever")).dim


@pytest.mark.nightly
def test_a_torn_checkpoint_costs_steps_and_no_loss(quiet_run, finish, tmp_path):
    """With the newest one cut short, as a disk that lost its last blocks has it, the one before is gone on from."""
    run = tmp_path / "run"
    process = start(run)
    wait_for_step(run, 13, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    marks = RunDirectory(run).checkpoint_marks()
    assert len(marks) == 2
    with marks[-1].path.open("r+b") as file:
        file.truncate(marks[-1].path.stat().st_size // 2)
    output = finish(run)
    assert f"{marks[-1].path} is torn" in output
    assert f"resuming at step {marks[0].step}" in output
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()
