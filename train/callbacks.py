"""Lightning callbacks of every training: the step boundary with metrics and progress, settings, and temperatures.

A user's callbacks act beside them, on rank 0.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)

from replug.config.errors import UserError
from replug.config.schema import LossConfig
from replug.data.datamodule import Position
from replug.data.progress import Progress
from replug.models.ensemble import log_softmax
from replug.train.loss import lm_scores
from replug.train.module import LSRModule
from replug.train.sources import BatchSource
from replug.train.step_metrics import StepClock

log = logging.getLogger(__name__)

NEARLY_UNIFORM, NEARLY_ONE_HOT = 0.995, 0.05  # shares of the maximal entropy

# Callbacks of Lightning that need what a training here does not have.
REFUSED: dict[type[pl.Callback], str] = {
    Checkpoint: (
        "replug writes checkpoints every checkpoint.every_steps steps, and saves the weights that are best on "
        "development texts"
    ),
    ProgressBar: "replug shows its own progress",
    GradientAccumulationScheduler: "train.micro_batches accumulates gradients",
    BatchSizeFinder: "train.batch_size is the size of a batch",
    LearningRateFinder: "train.lr is the learning rate",
    StochasticWeightAveraging: "the index and the development texts measure the weights that are trained",
    WeightAveraging: "the index and the development texts measure the weights that are trained",
}


def require_callbacks(callbacks: Sequence[pl.Callback]) -> None:
    """Raise UserError for an object that is not a callback, or cannot work in a training."""
    for callback in callbacks:
        kind = type(callback)
        if not isinstance(callback, pl.Callback):
            raise UserError(
                f"callbacks: {kind.__module__}.{kind.__name__} is not a pytorch_lightning.Callback; expected one "
                "(`from pytorch_lightning import Callback`)"
            )
        for refused, reason in REFUSED.items():
            if isinstance(callback, refused):
                raise UserError(f"callbacks: {kind.__name__} cannot work here: {reason}; leave it out")


def require_measured(callbacks: Sequence[pl.Callback], has_dev: bool, has_questions: bool) -> None:
    """Raise UserError for an `EarlyStopping` whose metric is not measured while training."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and has_questions and callback.monitor == "dev/bpb":
            raise UserError(
                "callbacks: EarlyStopping looks at dev/bpb, and questions are measured in place of development texts; "
                "expected dev/mrr with mode='max', or data.questions=null"
            )
        if isinstance(callback, EarlyStopping) and not (has_dev or has_questions):
            raise UserError(
                "callbacks: EarlyStopping looks at its metric where development texts or questions were measured, and "
                "this run has none; set data.questions, data.num_dev or data.dev, or leave it out"
            )


class StepBoundary(pl.Callback):
    """Drives the source of batches: `advance` before every step and `end` after it. Rank 0's.

    `check` raises what ends the run. The LM scores `pairs` in each step. The source's state in a checkpoint is this
    callback's.
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
        assert self._progress is not None
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


class OwnSettings(pl.Callback):
    """Puts back what Lightning's set-up changes by itself."""

    def __init__(self, install_signals: Callable[[], None], threads: int) -> None:
        self._install_signals, self._threads = install_signals, threads

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install_signals()  # its handler takes part in a collective from within a signal, which may never end
        torch.set_num_threads(self._threads)  # with DDP it takes all cores, and other numbers give other last bits
        # A resumed run has as many micro-batches as it is told now; its checkpoint may be of more ranks with fewer.
        # A checkpoint of a step's end was written before Lightning counted the step; it counts now.
        loop, done = trainer.fit_loop.epoch_loop, trainer.global_step * trainer.accumulate_grad_batches
        progress = loop.batch_progress.current
        progress.ready, progress.completed = done, done - int(loop.restarted_on_train_batch_end)


class TemperatureCheck(pl.Callback):
    """Warns after the first step if gamma or beta do not suit its scores.

    A temperature far too high makes every document equally good, and one far too low keeps a single one: either way the
    retriever learns nothing of the rest. Half the maximal entropy is a sound middle.
    """

    def __init__(self, loss: LossConfig) -> None:
        self._loss = loss

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if batch.step > 0 or not batch.is_first:
            return
        assert isinstance(pl_module, LSRModule) and pl_module.batch is not None
        scored, loss = pl_module.batch, self._loss
        sums, counts = torch.from_numpy(scored.sum_logprobs), torch.from_numpy(scored.num_tokens)
        z = lm_scores(sums, counts, loss.lm_score.value).numpy()
        for warning in (
            temperature_warning("Q, the LM's likelihood of the documents,", "loss.beta", z, loss.beta),
            temperature_warning(
                "P_R, the retrieval likelihood,", "loss.gamma", scored.retrieved.similarities, loss.gamma
            ),
        ):
            if warning is not None:
                log.warning(warning)


def entropy_share(scores: np.ndarray, temperature: float) -> float:
    """Return the mean entropy of softmax(scores / temperature) as a share of log K, its maximum; K is at least 2."""
    log_p = log_softmax(np.asarray(scores, dtype=np.float64) / temperature)
    entropies = -(np.exp(log_p) * np.where(np.isfinite(log_p), log_p, 0.0)).sum(axis=-1)
    return float(entropies.mean() / np.log(log_p.shape[-1]))


def half_entropy_temperature(scores: np.ndarray) -> float | None:
    """Return the temperature that gives half of the maximal entropy; None where ties keep the entropy above it."""
    low, high = -20.0, 20.0  # natural logarithms of the temperature; entropy rises with it
    if entropy_share(scores, np.exp(low)) > 0.5:
        return None
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_share(scores, np.exp(middle)) < 0.5 else (low, middle)
    return float(np.exp((low + high) / 2))


def temperature_warning(name: str, key: str, scores: np.ndarray, temperature: float) -> str | None:
    """Return advice about `key`, or None if the distribution is neither flat nor one-hot."""
    share = entropy_share(scores, temperature)
    if NEARLY_ONE_HOT < share < NEARLY_UNIFORM:
        return None
    shape = "nearly uniform" if share >= NEARLY_UNIFORM else "nearly one-hot"
    better = half_entropy_temperature(scores)
    advice = "its scores are equal or nearly so" if better is None else f"{key}={better:.2g} would give half of it"
    return f"{name} is {shape} at {key}={temperature:g}: {share:.1%} of the maximal entropy; {advice}"
