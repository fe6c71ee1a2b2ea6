"""When a run's state is saved and how its checkpoints lie in the folder: torn, on a full disk, or with flipped bits."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replug.config.errors import Interrupted, NotFiniteError, RunError, UserError
from replug.data.datamodule import Position
from replug.data.files import file_sha256
from replug.data.folder import read_mark, write_mark
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.version_store import VersionStore
from replug.train.callbacks import Checkpointer, CheckpointWriter, _check_temperatures
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.step_metrics import StepClock
from tests.support.index_versions import DIM, LOSSY, begin, publish, write_corpus


class Writer:
    """Remembers the steps of checkpoints; each is written when it is waited for."""

    newest_step, _step = 4, 0

    def begin(self, step: int, state: dict, versions: set[int]) -> None:
        self._step = step

    def finish(self) -> bool:
        self.newest_step = max(self.newest_step, self._step)
        return True

    collect = finish

    def versions(self) -> set[int]:
        return {1}


def trainer(step: int) -> Any:
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=step))
    connector = SimpleNamespace(dump_checkpoint=lambda weights_only: {})
    state = {"global_step": step, "max_steps": 24, "should_stop": False}
    return SimpleNamespace(**state, fit_loop=loops, _checkpoint_connector=connector)


def checkpointer(writer: Writer, pruned: list[set[int]], is_restored: bool = True) -> Checkpointer:
    source = SimpleNamespace(versions_in_use=lambda: {2, 3}, prune=pruned.append)
    made = Checkpointer(writer, source, every_steps=4, clock=StepClock())  # type: ignore[arg-type]
    if is_restored:
        made.on_train_start(trainer(0), module())
    return made


def module(value: float = 0.0) -> Any:
    return SimpleNamespace(parameters=lambda: iter([torch.full((3,), value)]))


@pytest.mark.parametrize(
    ("error", "is_restored", "saved"),
    [
        (Interrupted("SIGTERM"), True, 7),
        (RunError("index v2 is gone"), False, 4),  # Lightning knows its step before its index and batches are there
        (NotFiniteError("nan"), True, 4),
        (ValueError("a mistake of ours"), True, 4),
    ],
)
def test_a_run_that_ends_early_saves_its_steps_if_they_can_be_trusted(error, is_restored, saved, capsys):
    writer, pruned = Writer(), []
    checkpointer(writer, pruned, is_restored).on_exception(trainer(7), module(), error)
    assert writer.newest_step == saved
    if saved == 7:
        assert pruned[-1] == {1, 2, 3}, "versions in use, and those of checkpoints"
        assert "saved step 7: the same command resumes from there" in capsys.readouterr().err


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint():
    writer = Writer()
    with pytest.raises(NotFiniteError, match="the weights after 8 steps"):
        checkpointer(writer, []).on_train_batch_end(trainer(8), module(torch.nan), None, Position(7), 7)
    assert writer._step == 0


@pytest.mark.parametrize(("entropy", "advice"), [(2.3, "try a smaller loss.beta"), (0.05, "try a larger loss.beta")])
def test_a_warning_after_the_first_step_names_the_temperature_that_teaches_little(entropy, advice, capsys) -> None:
    _check_temperatures({"lm/entropy": torch.tensor(entropy), "retriever/entropy": torch.tensor(1.2)}, 10)
    [line] = capsys.readouterr().err.splitlines()
    assert "loss.beta: lm/entropy is" in line and line.endswith(advice)


# Checkpoints on the disk --------------------------------------------------------------------------------------


def checkpoint(run: RunDirectory, step: int, versions: tuple[int, ...] = (0,)) -> Path:
    path = run.checkpoint(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not run.index.exists():
        write_corpus(run.data / "documents")
        begin(VersionStore(run.index), version=0)
    path.write_bytes(bytes([step]) * 100)
    run.mark(CheckpointMark(path, step, versions, file_sha256(path)))
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_the_newest_whole_checkpoint_is_taken_and_a_torn_one_is_named(run, capsys):
    checkpoint(run, 4)
    torn = checkpoint(run, 8)
    torn.write_bytes(torn.read_bytes()[:50])
    assert run.newest_checkpoint().step == 4
    assert f"{torn} is torn" in capsys.readouterr().err
    run.forget_after(4)
    assert [mark.step for mark in run.checkpoint_marks()] == [4]
    run.checkpoint(4).write_bytes(b"torn")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole"):
        run.newest_checkpoint()


def test_a_checkpoint_whose_index_version_is_gone_is_skipped_unless_only_its_weights_are_wanted(run, capsys):
    """Two runs in one folder removed each other's versions."""
    checkpoint(run, 8)
    shutil.rmtree(run.index / "v000000")
    begin(VersionStore(run.index), version=0)
    newest = checkpoint(run, 12, (0, 1))
    assert run.newest_checkpoint().step == 8
    assert f"{newest} needs index version 1, which is gone from {run.index}" in capsys.readouterr().err
    assert run.newest_checkpoint(with_index=False).step == 12


def test_a_checkpoint_of_another_version_of_replug_is_refused_by_name(run):
    mark = checkpoint(run, 4).with_suffix(".json")
    write_mark(mark, {**read_mark(mark, ""), "format": 1})
    with pytest.raises(UserError, match=r"step-000004.json is of another version of replug"):
        run.newest_checkpoint()


def state(value: float) -> dict:
    return {"weights": {"a": torch.full((1000,), value)}, "optimizer": [{0: {"step": torch.tensor(value)}}], "epoch": 0}


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_holds_the_state_of_its_step_though_the_steps_go_on_and_counts_once_it_is_marked(run, monkeypatch):
    now, written, save = state(1.0), threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *given: written.wait(100) and save(*given))
    with closing(CheckpointWriter(run, keep_last=2, newest_step=0)) as writer:
        writer.begin(4, now, {0, 1})
        now["weights"]["a"].fill_(2.0)  # the next step, in place
        assert not writer.collect() and run.newest_checkpoint(with_index=False) is None
        written.set()
        assert writer.finish() and writer.newest_step == 4 and not writer.finish()
    mark = run.newest_checkpoint(with_index=False)
    assert (mark.step, mark.versions, mark.sha256) == (4, (0, 1), file_sha256(mark.path))
    saved = torch.load(mark.path, weights_only=True)
    assert saved["weights"]["a"].unique().tolist() == [1.0]
    assert saved["optimizer"] == [{0: {"step": torch.tensor(1.0)}}]


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(run, monkeypatch):
    with closing(CheckpointWriter(run, keep_last=1, newest_step=0)) as writer:
        writer.begin(4, state(1.0), {0})
        writer.finish()
        monkeypatch.setattr(torch, "save", full)
        writer.begin(8, state(2.0), {0})
        with pytest.raises(RunError, match=r"step-000008\.partial cannot be written: No space left on device"):
            writer.finish()
    assert writer.newest_step == run.newest_checkpoint(with_index=False).step == 4
    assert list(run.checkpoints.glob("*.partial")) == []


# One flipped bit: caught by name, or without effect; never another answer ----------------------------------------

FLIPS = 6  # of each file, at places spread over it


def flipped(path: Path, count: int = FLIPS) -> Iterator[None]:
    """The file with one bit after another flipped; whole again at the end."""
    whole = path.read_bytes()
    rng = np.random.default_rng(len(whole))
    for place in sorted({int(place) for place in rng.integers(len(whole), size=count)}):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        yield
    path.write_bytes(whole)


def num_caught(path: Path, read: Callable[[], object]) -> int:
    """How many flips were caught; the others must change nothing."""
    before, caught = read(), 0
    for _ in flipped(path):
        try:
            after = read()
        except (UserError, RunError):
            caught += 1
        else:
            assert after == before, path
    return caught


@pytest.mark.parametrize("changes", [{}, LOSSY], ids=["exact", "lossy"])
def test_an_index_answers_the_same_or_not_at_all(changes: dict, tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "index")
    write_corpus(tmp_path / "data/documents")
    publish(store, begin(store, **changes))
    queries = np.random.default_rng(1).standard_normal((3, DIM)).astype(np.float32)

    def search() -> list:
        return [part.tolist() for part in LocalIndex(tmp_path / "index", 1).search(queries, 4)]

    files = [path for path in sorted((tmp_path / "index").rglob("*")) if path.is_file()]
    caught = {path.name for path in files if num_caught(path, search)}
    assert {"manifest.json", "model.safetensors", "tokenizer.json", "config.json"} <= caught
    assert caught & {"vectors-00000.npy", "shard-00000.faiss"}


def test_a_checkpoints_mark_leads_to_a_whole_checkpoint_or_to_none(run: RunDirectory) -> None:
    checkpoint(run, 4)
    mark = checkpoint(run, 8).with_suffix(".json")
    for _ in flipped(mark, 100):
        newest = run.newest_checkpoint()
        assert newest is not None and newest.sha256 == file_sha256(run.checkpoint(newest.step))
    assert run.newest_checkpoint().step == 8
