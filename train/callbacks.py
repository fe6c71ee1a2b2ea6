"""Everything periodic, as Lightning callbacks: the step boundary, checkpoints, metrics and progress."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from replug.data.datamodule import Position
from replug.data.progress import Progress
from replug.data.records import RetrievedBatch
from replug.index_workers.build_plan import IndexState
from replug.models.ensemble import log_softmax
from replug.train.loss import lm_scores
from replug.train.module import LossSettings
from replug.train.pipeline import BatchPipeline
from replug.train.refresh import RefreshController
from replug.train.step_metrics import StepClock

log = logging.getLogger(__name__)

NEARLY_UNIFORM, NEARLY_ONE_HOT = 0.995, 0.05  # shares of the maximal entropy


class StepBoundary(pl.Callback):
    """What happens before every step, in this order: swap or start a refresh, then fill the pipeline. Rank 0's.

    Its state in a checkpoint is the live index version, the refresh under way, and the batches in flight.
    """

    def __init__(
        self,
        refresh: RefreshController,
        pipeline: BatchPipeline,
        offer_best: Callable[[IndexState, float | None], None],
        clock: StepClock,
        lm_metrics: Callable[[], dict[str, float]],
        check: Callable[[], None],
    ) -> None:
        self._refresh, self._pipeline, self._offer_best, self._clock = refresh, pipeline, offer_best, clock
        self._lm_metrics, self._check = lm_metrics, check
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Serve version 0 of a new run, or what a checkpoint says. Minutes, in which other ranks wait for a batch."""
        if self._restored is None:
            self._refresh.start()
        else:
            self._refresh.restore(self._restored["refresh"])
            self._pipeline.restore([batch_from_state(state) for state in self._restored["batches"]])
        self._offer_best(self._refresh.live, self._refresh.heldout_bpb)
        self._clock.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_first:
            return
        self._check()
        if self._refresh.at_boundary(batch.step):
            live, measures, bpb = self._refresh.live, self._refresh.last.measures, self._refresh.heldout_bpb
            log.info(
                f"step {batch.step}: swapped to index v{live.version} (weights of step {live.step}); recall "
                f"{measures.recall:.3f}, {measures.overlap:.0%} of the documents found stay, vectors moved by "
                f"{measures.drift:.4f}" + ("" if bpb is None else f"; held-out {bpb:.4f} bits per byte")
            )
            self._offer_best(self._refresh.live, self._refresh.heldout_bpb)
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


def _index_metrics(refresh: RefreshController, step: int) -> dict[str, float]:
    """What serves now, how it was made and what it is like; and the refreshes that came to nothing.

    Logged at every step: Lightning would repeat a value that is logged now and then.
    """
    last = refresh.last
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
        "index/swap_wait_seconds": refresh.swap_wait_seconds,
        "index/swap_ms": refresh.swap_ms,
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
    """Before the first step: do gamma and beta suit its scores? Those in flight behind it go on meanwhile.

    A temperature far too high makes every document equally good, and one far too low keeps a single one: either way the
    retriever learns nothing of the rest. Half the maximal entropy is a sound middle.
    """

    def __init__(self, pipeline: BatchPipeline, loss: LossSettings) -> None:
        self._pipeline, self._loss = pipeline, loss

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if batch.step > 0 or not batch.is_first:
            return
        scored = self._pipeline.peek(batch.step)
        sums, counts = torch.from_numpy(scored.sum_logprobs), torch.from_numpy(scored.num_tokens)
        similarities = scored.retrieved.similarities
        z = lm_scores(sums, counts, self._loss.lm_score).numpy()
        for warning in (
            temperature_warning("Q, the LM's likelihood of the documents,", "loss.beta", z, self._loss.beta),
            temperature_warning("P_R, the retrieval likelihood,", "loss.gamma", similarities, self._loss.gamma),
        ):
            if warning is not None:
                log.warning(warning)


def entropy_share(scores: np.ndarray, temperature: float) -> float:
    """Mean entropy of softmax(scores / temperature) as a share of the maximum, log K, for K of at least 2."""
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
    """What to tell the user about `key`, or None where the distribution is neither flat nor one-hot."""
    share = entropy_share(scores, temperature)
    if NEARLY_ONE_HOT < share < NEARLY_UNIFORM:
        return None
    shape = "nearly uniform" if share >= NEARLY_UNIFORM else "nearly one-hot"
    better = half_entropy_temperature(scores)
    advice = "its scores are equal or nearly so" if better is None else f"{key}={better:.2g} would give half of it"
    return f"{name} is {shape} at {key}={temperature:g}: {share:.1%} of the maximal entropy; {advice}"


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
