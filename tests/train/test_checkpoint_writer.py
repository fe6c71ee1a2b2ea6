"""Checkpoints written beside the steps: what is written is the state of its step, and a full disk is named."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from replug.config.errors import RunError
from replug.data.files import file_sha256
from replug.train import checkpoints
from replug.train.checkpoints import CheckpointWriter
from replug.train.run_dir import RunDirectory
from tests.support.command_line import BASE, ROOT
from tests.support.runs import metrics, what_must_be_equal


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def state(value: float) -> dict:
    return {"weights": {"a": torch.full((1000,), value)}, "optimizer": [{0: {"step": torch.tensor(value)}}], "epoch": 0}


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_holds_the_state_of_its_step_and_its_mark_the_checksum(run):
    now = state(1.0)
    with CheckpointWriter(run, keep_last=2, newest_step=0) as writer:
        writer.begin(4, now, {0, 1})
        now["weights"]["a"].fill_(2.0)  # the next step, in place
        assert writer.finish() and not writer.finish()
    mark = run.newest_checkpoint(with_index=False)
    assert mark is not None
    assert (mark.step, mark.versions, mark.sha256) == (4, (0, 1), file_sha256(mark.path))
    saved = torch.load(mark.path, weights_only=True)
    assert saved["weights"]["a"].unique().tolist() == [1.0]
    assert saved["optimizer"] == [{0: {"step": torch.tensor(1.0)}}]


def test_only_the_last_few_checkpoints_stay_and_their_versions_are_known(run):
    with CheckpointWriter(run, keep_last=2, newest_step=0) as writer:
        for step in (4, 8, 12):
            writer.begin(step, state(step), {step})
            writer.finish()
        assert writer.versions() == {8, 12}
    files = sorted(path.name for path in run.checkpoints.iterdir())
    assert files == [f"step-{step:06d}.{kind}" for step in (8, 12) for kind in ("ckpt", "json")]


def test_the_steps_go_on_while_a_checkpoint_is_written(run, monkeypatch):
    written, save = threading.Event(), checkpoints._save
    monkeypatch.setattr(checkpoints, "_save", lambda *given: written.wait(30) and save(*given))
    with CheckpointWriter(run, keep_last=2, newest_step=0) as writer:
        writer.begin(4, state(1.0), {0})
        assert not writer.collect()
        assert run.newest_checkpoint(with_index=False) is None, "a checkpoint counts once it is marked"
        written.set()
        assert writer.finish()
        assert writer.newest_step == 4


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(run, monkeypatch):
    with CheckpointWriter(run, keep_last=1, newest_step=0) as writer:
        writer.begin(4, state(1.0), {0})
        writer.finish()
        monkeypatch.setattr(torch, "save", full)
        writer.begin(8, state(2.0), {0})
        with pytest.raises(RunError, match=r"step-000008\.partial cannot be written: No space left on device"):
            writer.finish()
        assert writer.newest_step == 4
    assert run.newest_checkpoint(with_index=False).step == 4
    assert list(run.checkpoints.glob("*.partial")) == []


def test_what_a_full_device_says_is_told_as_it_is():
    """torch's own writer turns it into an error of its own, where it is not given the chance to raise."""
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints._save({"a": torch.zeros(10**6)}, Path("/dev/full"))


# Whole runs -----------------------------------------------------------------------------------------------


def arguments(run: Path, *overrides: str) -> list[str]:
    return ["train", str(ROOT / "configs/debug.yaml"), f"run_dir={run}", *BASE, *overrides]


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_disk_that_is_full_at_a_checkpoint_ends_every_rank_and_the_same_command_goes_on(
    replug, finish, quiet_run, tmp_path, monkeypatch, ranks
):
    """Rank 0 is this process. The checkpoint of step 4 is there, those of step 8 and of the end are not."""
    run, save = tmp_path / "run", torch.save
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda what, *to: full() if what["global_step"] > 4 else save(what, *to))
        ended = replug(*arguments(run, f"resources.train={ranks}"))
    assert ended.status == 1, ended.printed
    assert "step-000008.partial cannot be written: No space left on device" in ended.errors.splitlines()[-1]
    assert "is not saved, step 4 is: " in ended.printed and "Traceback" not in ended.printed
    assert "resuming at step 4" in finish(run, *([] if ranks == 1 else ["train.micro_batches=2"]))
    assert [row["step"] for row in metrics(run)] == list(range(24))
    if ranks == 1:
        assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
