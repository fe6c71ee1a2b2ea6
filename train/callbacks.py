"""Lightning callbacks of every training: the step boundary, checkpoints and settings.

Checkpoints are written in the background: the step's thread copies the state to host memory; another thread writes the
file with its checksum, marks it and removes old checkpoints. No other rank takes part, so a full disk stalls none of
them.
"""

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from replug.config.errors import NotFiniteError, RunError, UserError
from replug.data.datamodule import Position
from replug.data.files import file_sha256, persist, writing
from replug.data.progress import Progress
from replug.train.module import LSRModule, require_finite_weights
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchSource
from replug.train.step_metrics import StepClock

log = logging.getLogger(__name__)

NEARLY_UNIFORM, NEARLY_ONE_HOT = 0.995, 0.05  # shares of the maximal entropy


class StepBoundary(pl.Callback):
    """Drives the source of batches on rank 0: `advance` before every step and `end` after it.

    `check` raises the error that ends the run. The LM scores `pairs` pairs in each step. In a checkpoint, this callback
    holds the state of the source.
    """

    def __init__(self, source: BatchSource, clock: StepClock, check: Callable[[], None], pairs: int = 0) -> None:
        self._source, self._clock, self._check, self._pairs = source, clock, check, pairs
        self._restored: dict[str, Any] | None = None
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._source.start(self._restored)
        work = ("pairs", self._pairs) if self._pairs else None
        self._progress = Progress("step", trainer.max_steps, trainer.global_step, work)
        self._clock.read()  # a step begins now

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if batch.is_first:
            self._check()
            self._source.advance(batch.step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        times = self._clock.read()
        pl_module.log_dict({**times, **self._source.end(batch.step)})
        assert self._progress is not None and isinstance(pl_module, LSRModule) and pl_module.batch is not None
        if batch.step == 0:
            _check_temperatures(trainer.callback_metrics, pl_module.batch.retrieved.doc_rows.shape[1])
        self._progress.advance(note=_progress_note(trainer.callback_metrics))

    def state_dict(self) -> dict[str, Any]:
        return self._source.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict


def _progress_note(metrics: Mapping[str, torch.Tensor]) -> str:
    note = f"loss {metrics['train/loss']:.4f}"
    if "index/version" not in metrics:
        return note
    return (
        f"{note} · index v{metrics['index/version']:.0f}, {metrics['index/age_steps']:.0f} steps old · "
        f"waited {metrics['time/wait_scores_seconds']:.1f} s for the LM"
    )


def _check_temperatures(metrics: Mapping[str, torch.Tensor], k: int) -> None:
    """Warn if a temperature makes `k` documents equally good, or keeps a single one: training then learns little."""
    for name, key in (("lm/entropy", "loss.beta"), ("retriever/entropy", "loss.gamma")):
        share = float(metrics[name]) / math.log(k) if name in metrics else 0.5
        if share >= NEARLY_UNIFORM or share <= NEARLY_ONE_HOT:
            shape, advice = ("uniform", "smaller") if share >= NEARLY_UNIFORM else ("one-hot", "larger")
            log.warning(f"{key}: {name} is {share:.1%} of its maximum, nearly {shape}; try a {advice} {key}")


class OwnSettings(pl.Callback):
    """Restores signal handlers, thread count and batch progress after Lightning's set-up."""

    def __init__(self, install_signals: Callable[[], None], threads: int) -> None:
        self._install_signals, self._threads = install_signals, threads

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install_signals()  # Lightning's handler runs a collective inside a signal, which may never end
        torch.set_num_threads(self._threads)  # DDP takes all cores, and another thread count changes the last bits
        # Count in this run's micro-batches: the checkpoint may come from more ranks with fewer of them.
        # A checkpoint at a step's end predates Lightning's count of that step; Lightning adds it after the restart.
        loop, done = trainer.fit_loop.epoch_loop, trainer.global_step * trainer.accumulate_grad_batches
        progress = loop.batch_progress.current
        progress.ready, progress.completed = done, done - int(loop.restarted_on_train_batch_end)


class CheckpointWriter:
    """Writes one checkpoint at a time. `newest_step` is the step of the newest marked checkpoint."""

    def __init__(self, run: RunDirectory, keep_last: int, newest_step: int) -> None:
        self._run, self._keep, self.newest_step = run, keep_last, newest_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, step: int, state: dict[str, Any], versions: set[int]) -> None:
        """Copy the state and start to write it; the previous checkpoint must have ended."""
        assert self._under_way is None
        # Copy to host memory: the next step changes weights and moments in place.
        copied = apply_to_collection(state, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
        self._under_way = self._thread.submit(self._write, step, copied, versions)

    def collect(self) -> bool:
        """Return whether a checkpoint has ended since the last call. Raises RunError if it failed."""
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

    def close(self) -> None:
        """Wait for the checkpoint under way, even if it fails."""
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
        self._run.unmark(step)  # if the step was saved before, its old mark must not describe the new file
        partial.replace(path)
        self._run.mark(CheckpointMark(path, step, tuple(sorted(versions)), sha256))
        self.newest_step = step
        for old in self._run.checkpoint_marks()[: -self._keep]:
            self._run.unmark(old.step)
            old.path.unlink()


class Checkpointer(pl.Callback):
    """Saves every N steps and on early exit. Rank 0 only.

    An index version stays on disk while the live index or a kept checkpoint uses it.
    """

    def __init__(self, writer: CheckpointWriter, source: BatchSource, every_steps: int, clock: StepClock) -> None:
        self._writer, self._source, self._every, self._clock = writer, source, every_steps, clock
        self._is_restored = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that the step boundary, called earlier, has restored the checkpoint's state."""
        self._is_restored = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        """Prune index versions after a finished checkpoint. Raises RunError if it could not be written."""
        if batch.is_first and self._writer.collect():
            self._prune()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        is_end = trainer.global_step == trainer.max_steps or trainer.should_stop
        if batch.is_last and (trainer.global_step % self._every == 0 or is_end):
            with self._clock.measure("checkpoint"):
                self._finish()
                self._begin(trainer, pl_module)
                if is_end:
                    self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save the steps of a run that cannot continue (pre-empted, no LM answers, budget spent).

        A run that fails while restoring saves nothing: its checkpoint would pass partial state for the whole.
        A run with numbers that are not finite would fail again. On a full disk the newest checkpoint counts.
        """
        is_meant = isinstance(exception, RunError | UserError) and not isinstance(exception, NotFiniteError)
        if not is_meant or not self._is_restored:
            return
        # Lightning assumes that a checkpoint is written before its step is counted, and adds the step.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step - 1
        try:  # skip without a new step: the newest checkpoint may be restored in part only
            self._finish()
            if trainer.global_step > self._writer.newest_step:
                self._begin(trainer, pl_module)
                self._finish()
        except RunError as error:
            log.warning(f"step {trainer.global_step} is not saved, step {self._writer.newest_step} is: {error}")
        else:
            log.info(f"saved step {trainer.global_step}: the same command resumes from there")

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
