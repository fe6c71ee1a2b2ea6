"""Checkpoints are written beside the steps, by rank 0 alone.

The step's thread copies the state to host memory. A thread of its own writes the file with its checksum, puts it on
the disk, marks it and removes what is too old. No other rank takes part, so none waits where a disk is full.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from replug.config.errors import NotFiniteError, RunError, UserError
from replug.data.datamodule import Position
from replug.data.files import file_sha256, persist, writing
from replug.train.module import require_finite_weights
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchSource
from replug.train.step_metrics import StepClock

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2  # while training


class CheckpointWriter:
    """Writes one checkpoint at a time; a context, which waits for the last one. `newest_step` is the newest marked."""

    def __init__(self, run: RunDirectory, keep_last: int, newest_step: int) -> None:
        self._run, self._keep, self.newest_step = run, keep_last, newest_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, step: int, state: dict[str, Any], versions: set[int]) -> None:
        """Copy the state and return; the one before must have ended."""
        assert self._under_way is None
        # As it is now, in host memory: the next step changes weights and moments in place.
        copied = apply_to_collection(state, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
        self._under_way = self._thread.submit(self._write, step, copied, versions)

    def collect(self) -> bool:
        """Return whether a checkpoint is done since the last call. Raises RunError if it failed."""
        return self._under_way is not None and self._under_way.done() and self.finish()

    def finish(self) -> bool:
        """Wait for the checkpoint under way; returns as `collect` does."""
        if self._under_way is None:
            return False
        ended, self._under_way = self._under_way, None
        ended.result()
        return True

    def versions(self) -> set[int]:
        """Return the index versions that the checkpoints need."""
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
            with partial.open("wb") as file:
                torch.save(state, file)
            persist(partial)
            sha256 = file_sha256(partial)
        self._run.unmark(step)  # where the same step is saved again: else the old mark would be of the new file
        partial.replace(path)
        self._run.mark(CheckpointMark(path, step, tuple(sorted(versions)), sha256))
        self.newest_step = step
        for old in self._run.checkpoint_marks()[: -self._keep]:
            self._run.unmark(old.step)
            old.path.unlink()


class Checkpointer(pl.Callback):
    """Saves every N steps and on early exit. Rank 0 only.

    An index version stays on disk while the live index or a kept checkpoint uses it. The checkpoint of a step at which
    a callback ended the training says so: a run that is resumed from it has ended too.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        source: BatchSource,
        every_steps: int,
        clock: StepClock,
    ) -> None:
        self._writer, self._source, self._every, self._clock = writer, source, every_steps, clock
        self._is_restored = self._is_ended = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that the step boundary, which is called before, has restored what a checkpoint says."""
        self._is_restored = True
        trainer.should_stop |= self._is_ended

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        """Raise RunError for a checkpoint that could not be written, and prune index versions after one that was."""
        if batch.is_first and self._writer.collect():
            self._prune()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        self._is_ended |= trainer.should_stop
        trainer.should_stop = self._is_ended and batch.is_last  # a step in parts is done to its end
        is_end = trainer.global_step == trainer.max_steps or trainer.should_stop
        if batch.is_last and (trainer.global_step % self._every == 0 or is_end):
            with self._clock.measure("checkpoint"):
                self._finish()
                self._begin(trainer, pl_module)
                if is_end:
                    self._finish()

    def state_dict(self) -> dict[str, Any]:
        return {"is_ended": True} if self._is_ended else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_ended = state_dict["is_ended"]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save the steps of a run that cannot go on (pre-empted, no LM answers, a budget is spent).

        A run that fails before it is restored saves nothing: its checkpoint would claim that half of the run was all.
        A run whose numbers are not finite would fail again. On a full disk the newest checkpoint counts.
        """
        is_meant = isinstance(exception, RunError | UserError) and not isinstance(exception, NotFiniteError)
        if not is_meant or not self._is_restored:
            return
        # Lightning assumes that each checkpoint is written at a step's end, before that step is counted, and adds it.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step - 1
        try:  # nothing where no step was done since the newest: half of what it brings back may be there
            self._finish()
            if trainer.global_step > self._writer.newest_step:
                self._begin(trainer, pl_module)
                self._finish()
        except RunError as error:
            log.warning(f"step {trainer.global_step} is not saved, step {self._writer.newest_step} is: {error}")
        else:
            log.info(f"saved step {trainer.global_step}: the same command goes on from there")

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin a checkpoint without `trainer.save_checkpoint`, which ends in a barrier."""
        require_finite_weights(module.parameters(), trainer.global_step)
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._writer.begin(trainer.global_step, state, self._source.versions_in_use())

    def _finish(self) -> None:
        if self._writer.finish():
            self._prune()

    def _prune(self) -> None:
        self._source.prune(self._source.versions_in_use() | self._writer.versions())
