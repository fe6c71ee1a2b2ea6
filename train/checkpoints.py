"""Checkpoints are written beside the steps, by rank 0 alone.

The step's thread copies the state to host memory. A thread of its own writes the file with its checksum, puts it on
the disk, marks it and removes what is too old. No other rank takes part, so none waits where a disk is full.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from replug.data.files import persist, writing
from replug.train.run_dir import CheckpointMark, RunDirectory


class CheckpointWriter:
    """One checkpoint at a time; a context, which waits for the last one. `newest_step` is that of the newest marked."""

    def __init__(self, run: RunDirectory, keep_last: int, newest_step: int) -> None:
        self._run, self._keep, self.newest_step = run, keep_last, newest_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, step: int, state: dict[str, Any], versions: set[int]) -> None:
        """Copy the state and return; the one before must have ended."""
        assert self._under_way is None
        self._under_way = self._thread.submit(self._write, step, _copied(state), versions)

    def collect(self) -> bool:
        """Whether a checkpoint is done since the last look. Raises RunError where it failed."""
        return self._under_way is not None and self._under_way.done() and self.finish()

    def finish(self) -> bool:
        """As `collect`, but waits for the one under way."""
        if self._under_way is None:
            return False
        ended, self._under_way = self._under_way, None
        ended.result()
        return True

    def versions(self) -> set[int]:
        """Index versions that the checkpoints need."""
        return set().union(*(mark.versions for mark in self._run.checkpoint_marks()))

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True)

    def _write(self, step: int, state: dict[str, Any], versions: set[int]) -> None:
        path = self._run.checkpoint(step)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        with writing(partial):
            sha256 = _save(state, partial)
            persist(partial)
        self._run.unmark(step)  # where the same step is saved again: else the old mark would be of the new file
        partial.replace(path)
        self._run.mark(CheckpointMark(path, step, tuple(sorted(versions)), sha256))
        self.newest_step = step
        for old in self._run.checkpoint_marks()[: -self._keep]:
            self._run.unmark(old.step)
            old.path.unlink()


class _HashedFile:
    """A file whose checksum is known when it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _save(state: dict[str, Any], path: Path) -> str:
    """Returns the checksum."""
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        torch.save(state, hashed)  # type: ignore[arg-type] # it asks for no more than the two methods
    return hashed.sha256.hexdigest()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """As it is now, in host memory: the next step changes weights and moments in place."""
    return apply_to_collection(state, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
