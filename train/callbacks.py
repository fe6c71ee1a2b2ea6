"""Everything periodic, as Lightning callbacks: the step boundary, checkpoints, metrics and progress."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from replug.config.errors import NotFiniteError, RunError, UserError
from replug.data.datamodule import Position
from replug.data.progress import Progress
from replug.data.records import RetrievedBatch, ScoredBatch
from replug.index_workers.build_plan import IndexState
from replug.train.batch_broadcast import BatchChannel
from replug.train.checkpoints import CheckpointWriter
from replug.train.finite import require_finite_weights
from replug.train.loss import lm_scores
from replug.train.module import LossSettings
from replug.train.pipeline import BatchPipeline
from replug.train.refresh import RefreshController
from replug.train.run_dir import RunDirectory
from replug.train.step_clock import StepClock
from replug.train.temperature import temperature_warning

log = logging.getLogger(__name__)


class StepBoundary(pl.Callback):
    """What happens before every step, in this order: swap or start a refresh, then fill the pipeline. Rank 0's.

    Its state in a checkpoint is the live index version, the refresh under way, and the batches in flight.
    """

    def __init__(
        self,
        refresh: RefreshController,
        pipeline: BatchPipeline,
        best: "BestRetriever",
        clock: StepClock,
        lm_metrics: Callable[[], dict[str, float]],
        check: Callable[[], None],
    ) -> None:
        self._refresh, self._pipeline, self._best, self._clock = refresh, pipeline, best, clock
        self._lm_metrics, self._check = lm_metrics, check
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Serve version 0 of a new run, or what a checkpoint says. Minutes, in which other ranks wait for a batch."""
        if self._restored is None:
            self._refresh.start()
        else:
            self._refresh.restore(self._restored["refresh"])
            self._pipeline.restore([batch_from_state(state) for state in self._restored["batches"]])
        self._best.offer(self._refresh.live, self._refresh.heldout_bpb)
        self._clock.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_first:
            return
        self._check()
        if self._refresh.at_boundary(batch.step) is not None:
            log.info(_describe_swap(batch.step, self._refresh))
            self._best.offer(self._refresh.live, self._refresh.heldout_bpb)
        self._pipeline.advance(batch.step, self._refresh.live)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        times = self._clock.read()
        pl_module.log_dict(
            {
                **_index_metrics(self._refresh, batch.step),
                **times,
                "throughput/pairs_per_second": self._pipeline.pairs_per_step / times["time/step_seconds"],
                **{f"scoring/{name}": value for name, value in self._lm_metrics().items()},
            }
        )

    def state_dict(self) -> dict[str, Any]:
        batches = [batch_to_state(batch) for batch in self._pipeline.state()]
        return {"refresh": self._refresh.state(), "batches": batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict


def _describe_swap(step: int, refresh: RefreshController) -> str:
    live, measures = refresh.live, refresh.last.measures
    return (
        f"step {step}: swapped to index v{live.version} (weights of step {live.step}); recall {measures.recall:.3f}, "
        f"{measures.overlap:.0%} of the documents found stay, vectors moved by {measures.drift:.4f}"
        + ("" if refresh.heldout_bpb is None else f"; held-out {refresh.heldout_bpb:.4f} bits per byte")
    )


def _index_metrics(refresh: RefreshController, step: int) -> dict[str, float]:
    """What serves now, how it was made and what it is like; and the refreshes that came to nothing.

    Logged at every step: Lightning would repeat a value that is logged now and then.
    """
    last, swap = refresh.last, refresh.last_swap
    heldout = {} if refresh.heldout_bpb is None else {"heldout/bpb": refresh.heldout_bpb}
    return {
        **heldout,
        "index/live_version": float(refresh.live.version),
        "index/live_step": float(refresh.live.step),
        "index/swapped": float(step > 0 and refresh.adopted_step == step),
        "index/refresh_under_way": float(refresh.is_under_way),
        **{f"index/{name}": value for name, value in asdict(last.measures).items()},
        "index/swap_build_seconds": last.build_seconds,
        "index/swap_documents_per_second": last.documents_per_second,
        "index/swap_wait_seconds": swap.wait_seconds,
        "index/swap_ms": swap.switch_ms,
        "index/refreshes_skipped": float(refresh.num_skipped),
        "index/refreshes_failed": float(refresh.num_failed),
    }


def batch_to_state(batch: RetrievedBatch) -> dict[str, Any]:
    """A record as tensors and numbers, which a checkpoint loads without unpickling objects."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else int(value)
        for name, value in asdict(batch).items()
    }


def batch_from_state(state: dict[str, Any]) -> RetrievedBatch:
    values: dict[str, Any] = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return RetrievedBatch(**values)


class OwnSettings(pl.Callback):
    """Puts back what Lightning's set-up changes by itself."""

    def __init__(self, install_signals: Callable[[], None], threads: int) -> None:
        self._install_signals, self._threads = install_signals, threads

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The last batch of a run of fewer steps is not the last of this one, which Lightning would take for done."""
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install_signals()  # its handler takes part in a collective from within a signal, which may never end
        torch.set_num_threads(self._threads)  # with DDP it takes all cores, and other numbers give other last bits
        # A resumed run has as many micro-batches as it is told now; its checkpoint may be of more ranks with fewer.
        # One that was saved at a step's end is of before Lightning counts it, and counts it now.
        loop, done = trainer.fit_loop.epoch_loop, trainer.global_step * trainer.accumulate_grad_batches
        progress = loop.batch_progress.current
        progress.ready, progress.completed = done, done - int(loop.restarted_on_train_batch_end)


class TemperatureCheck(pl.Callback):
    """Before the first step: do gamma and beta suit its scores? Those in flight behind it go on meanwhile."""

    def __init__(self, pipeline: BatchPipeline, loss: LossSettings) -> None:
        self._pipeline, self._loss = pipeline, loss

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if batch.step > 0 or not batch.is_first:
            return
        for warning in self._warnings(self._pipeline.peek(batch.step)):
            log.warning(f"{warning}")

    def _warnings(self, scored: ScoredBatch) -> list[str]:
        sums, counts = torch.from_numpy(scored.sum_logprobs), torch.from_numpy(scored.num_tokens)
        similarities = scored.retrieved.similarities
        z = lm_scores(sums, counts, self._loss.lm_score).numpy()
        found = [
            temperature_warning("Q, the LM's likelihood of the documents,", "loss.beta", z, self._loss.beta),
            temperature_warning("P_R, the retrieval likelihood,", "loss.gamma", similarities, self._loss.gamma),
        ]
        return [warning for warning in found if warning is not None]


class OpenChannel(pl.Callback):
    """Opens the channel for batches where the ranks have just met: rank 0 may then take hours to its first batch."""

    def __init__(self, channel: BatchChannel) -> None:
        self._channel = channel

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._channel.open()


class IndexUse(Protocol):
    """Who says which index versions are in use: the refreshes, or nobody."""

    def versions_in_use(self) -> set[int]: ...


class Checkpointer(pl.Callback):
    """Has a checkpoint written every so many steps, and where a run ends before its last. Rank 0's.

    An index version stays on disk while the live index or a kept checkpoint uses it.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        refresh: IndexUse,
        prune_versions: Callable[[set[int]], None],
        every_steps: int,
        clock: StepClock,
    ) -> None:
        self._writer, self._refresh, self._prune_versions = writer, refresh, prune_versions
        self._every, self._clock = every_steps, clock
        self._is_restored = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """By now the step boundary has restored what a checkpoint says; it comes before in the list of callbacks."""
        self._is_restored = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        """A checkpoint that could not be written ends the run at the next boundary."""
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
        """A run that cannot go on (pre-empted, no LM answers, a budget is spent) loses none of its steps.

        One that fails before it is restored saves nothing: a checkpoint would say that half of the run was all of it.
        One whose numbers are not finite would fail again. Where the disk is full, the newest checkpoint is what counts.
        """
        is_meant = isinstance(exception, RunError | UserError) and not isinstance(exception, NotFiniteError)
        if not is_meant or not self._is_restored:
            return
        # Lightning takes every checkpoint for one of a step's end, where that step is not counted yet, and adds it.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step - 1
        try:
            self._save(trainer, pl_module)
        except RunError as error:
            log.warning(f"step {trainer.global_step} is not saved, step {self._writer.newest_step} is: {error}")
        else:
            log.info(f"saved step {trainer.global_step}: the same command goes on from there")

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Nothing where no step was done since the newest: half of what it brings back may be there."""
        self._finish()
        if trainer.global_step > self._writer.newest_step:
            self._begin(trainer, module)
            self._finish()

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Not `trainer.save_checkpoint`, which ends in a barrier."""
        require_finite_weights(module.parameters(), trainer.global_step)
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._writer.begin(trainer.global_step, state, self._refresh.versions_in_use())

    def _finish(self) -> None:
        if self._writer.finish():
            self._prune()

    def _prune(self) -> None:
        self._prune_versions(self._refresh.versions_in_use() | self._writer.versions())


class BestRetriever:
    """Keeps the weights whose documents helped most on held-out text, apart from the checkpoints: `RUN_DIR/best`."""

    def __init__(self, run: RunDirectory, encoder_folder: Callable[[int], Path]) -> None:
        self._run, self._encoder_folder = run, encoder_folder

    def offer(self, index: IndexState, heldout_bpb: float | None) -> None:
        """Keep a version's snapshot if its bits per byte are the lowest so far."""
        best = self._run.best_bpb()
        if heldout_bpb is None or (best is not None and best <= heldout_bpb):
            return
        self._run.keep_best(self._encoder_folder(index.version), heldout_bpb, index.step)


class JsonLinesLogger(Logger):
    """`metrics.jsonl`: one object for every logged step, written and flushed at once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        return None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The run directory's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        append_row(self._path, {"step": step, **{k: v for k, v in metrics.items() if k != "epoch"}})


def append_row(path: Path, row: dict[str, Any]) -> None:
    """One line of JSON. Raises RunError where it cannot be written."""
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


class StepProgress(pl.Callback):
    """Lines with step, loss, index and the time left."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress = Progress("training", self._max_steps, done=trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        assert self._progress is not None
        metrics = trainer.callback_metrics
        self._progress.advance(
            note=f"loss {metrics['train/loss']:.4f} · index v{metrics['index/version']:.0f}, "
            f"{metrics['index/age_steps']:.0f} steps old · "
            f"waited {metrics['time/wait_scores_seconds']:.1f} s for the LM"
        )
