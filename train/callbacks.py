"""Everything periodic, as Lightning callbacks: the step boundary, checkpoints, metrics and progress."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from configs.errors import RunError, UserError
from data.files import write_json
from data.progress import Progress, say
from data.records import RetrievedBatch
from train.loss import lm_scores
from train.module import LossSettings
from train.pipeline import BatchPipeline
from train.refresh import RefreshController
from train.run_dir import CheckpointMark, RunDirectory
from train.temperature import temperature_warning


class StepBoundary(pl.Callback):
    """What happens before every step, in this order: swap or start a refresh, then fill the pipeline.

    Its state in a checkpoint is the live index version, the refresh under way, and the batches in flight.
    """

    def __init__(
        self, refresh: RefreshController, pipeline: BatchPipeline, lm_metrics: Callable[[], dict[str, float]]
    ) -> None:
        self._refresh, self._pipeline, self._lm_metrics = refresh, pipeline, lm_metrics
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: int, batch_idx: int
    ) -> None:
        self._start = time.monotonic()
        swap = self._refresh.at_boundary(batch)
        if swap is not None:
            say(_describe_swap(batch, self._refresh))
        pl_module.log_dict(_index_metrics(self._refresh, swapped=swap is not None))
        self._pipeline.advance(batch, self._refresh.live)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        seconds = time.monotonic() - self._start
        pl_module.log_dict(
            {
                "time/refresh_under_way": float(self._refresh.is_under_way),
                "time/step_seconds": seconds,
                "throughput/pairs_per_second": self._pipeline.pairs_per_step / seconds,
                **{f"scoring/{name}": value for name, value in self._lm_metrics().items()},
            }
        )

    def state_dict(self) -> dict[str, Any]:
        batches = [batch_to_state(batch) for batch in self._pipeline.state()]
        return {"refresh": self._refresh.state(), "batches": batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refresh.restore(state_dict["refresh"])
        self._pipeline.restore([batch_from_state(state) for state in state_dict["batches"]])


def _describe_swap(step: int, refresh: RefreshController) -> str:
    live, measures = refresh.live, refresh.last.measures
    return (
        f"step {step}: swapped to index v{live.version} (weights of step {live.step}); recall {measures.recall:.3f}, "
        f"{measures.overlap:.0%} of the documents found stay, vectors moved by {measures.drift:.4f}"
    )


def _index_metrics(refresh: RefreshController, swapped: bool) -> dict[str, float]:
    """What serves now, how it was made and what it is like; and the refreshes that came to nothing.

    Logged at every step: Lightning would repeat a value that is logged now and then.
    """
    last, swap = refresh.last, refresh.last_swap
    return {
        "index/live_version": float(refresh.live.version),
        "index/live_step": float(refresh.live.step),
        "index/swapped": float(swapped),
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


class TemperatureCheck(pl.Callback):
    """Before the first step: do gamma and beta suit the scores of the batches already in flight?"""

    def __init__(self, pipeline: BatchPipeline, loss: LossSettings) -> None:
        self._pipeline, self._loss = pipeline, loss

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: int, batch_idx: int
    ) -> None:
        if batch > 0:
            return
        for warning in self._warnings():
            say(f"warning: {warning}")

    def _warnings(self) -> list[str]:
        scored = self._pipeline.peek()
        sums = torch.from_numpy(np.concatenate([batch.sum_logprobs for batch in scored]))
        counts = torch.from_numpy(np.concatenate([batch.num_tokens for batch in scored]))
        similarities = np.concatenate([batch.retrieved.similarities for batch in scored])
        z = lm_scores(sums, counts, self._loss.lm_score).numpy()
        found = [
            temperature_warning("Q, the LM's likelihood of the documents,", "loss.beta", z, self._loss.beta),
            temperature_warning("P_R, the retrieval likelihood,", "loss.gamma", similarities, self._loss.gamma),
        ]
        return [warning for warning in found if warning is not None]


class Checkpointer(pl.Callback):
    """Writes a checkpoint every so many steps, beside and renamed, then its mark; prunes what nothing needs.

    An index version stays on disk while the live index or a kept checkpoint uses it.
    """

    def __init__(
        self,
        run: RunDirectory,
        every_steps: int,
        keep_last: int,
        refresh: RefreshController,
        prune_versions: Callable[[set[int]], None],
    ) -> None:
        self._run, self._every, self._keep = run, every_steps, keep_last
        self._refresh, self._prune_versions = refresh, prune_versions

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self._every == 0 or trainer.global_step == trainer.max_steps:
            self.save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """A run that cannot go on (no LM answers, a budget is spent, the index is damaged) loses none of its steps."""
        if isinstance(exception, RunError | UserError) and trainer.global_step not in [
            m.step for m in self._run.checkpoint_marks()
        ]:
            # Lightning takes every checkpoint for one of a step's end, where that step is not counted yet, and adds it.
            trainer.fit_loop.epoch_loop._batches_that_stepped -= 1
            self.save(trainer)
            say(f"saved step {trainer.global_step}: the same command goes on from there")

    def save(self, trainer: pl.Trainer) -> None:
        step, versions = trainer.global_step, self._refresh.versions_in_use()
        self._run.checkpoints.mkdir(exist_ok=True)
        path = self._run.checkpoints / f"step-{step:06d}.ckpt"
        partial = path.with_suffix(".partial")
        trainer.save_checkpoint(partial, weights_only=False)
        partial.replace(path)
        write_json(path.with_suffix(".json"), {"step": step, "versions": sorted(versions)})
        self._prune(versions)

    def _prune(self, versions: set[int]) -> None:
        marks = self._run.checkpoint_marks()
        for old in marks[: -self._keep]:
            old.path.with_suffix(".json").unlink()  # the mark first: without it the file does not count
            old.path.unlink()
        kept: list[CheckpointMark] = marks[-self._keep :]
        self._prune_versions(versions.union(*(mark.versions for mark in kept)))


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
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **{k: v for k, v in metrics.items() if k != "epoch"}}) + "\n")


class StepProgress(pl.Callback):
    """Lines with step, loss, index and the time left."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress = Progress("training", self._max_steps, done=trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert self._progress is not None
        metrics = trainer.callback_metrics
        self._progress.advance(
            note=f"loss {metrics['train/loss']:.4f} · index v{metrics['index/version']:.0f}, "
            f"{metrics['index/age_steps']:.0f} steps old · waited {metrics['pipeline/wait_seconds']:.1f} s for the LM"
        )
