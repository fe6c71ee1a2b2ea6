"""Lightning callbacks and loggers of every training: the step boundary, checkpoints, settings, and trackers.

Checkpoints are written in the background: the step's thread copies the state to host memory; another thread writes the
file with its checksum, marks it and removes old checkpoints. No other rank takes part, so a full disk stalls none of
them.
"""

import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger

from replug.config.choices import LoggerName, WandbMode
from replug.config.errors import NotFiniteError, RunError, UserError, require_extra
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.files import file_sha256, persist, write_json, writing
from replug.data.progress import Progress
from replug.train.module import LSRModule, require_finite_weights
from replug.train.pipeline import StepClock
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.sources import BatchSource

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


# Loggers -------------------------------------------------------------------------------------------------------------


class JsonLinesLogger(Logger):
    """`metrics.jsonl`: one object for every logged step, written and flushed at once."""

    name, version = "metrics", 0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def log_hyperparams(self, *params: Any, **more: Any) -> None:
        """Do nothing: the run directory's config.yaml holds them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one line of JSON. Raises RunError if it cannot be written."""
        row = {"step": step, **{name: value for name, value in metrics.items() if name != "epoch"}}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"{self._path} cannot be written: {error.strerror or error}") from error


def require_loggers(config: Config) -> None:
    """Raise UserError, before anything heavy starts, for a tracker that is not installed, or W&B without a login."""
    for name in config.loggers:
        require_extra(name, name, what=f"loggers=[{name}]")
    if config.wandb.mode is not WandbMode.off:
        require_extra("wandb", "wandb", what=f"wandb.mode={config.wandb.mode}")
    if config.wandb.mode is WandbMode.online and not has_wandb_key():
        raise UserError("wandb.mode is online, and W&B has no key; run `wandb login`, or set $WANDB_API_KEY")


def has_wandb_key() -> bool:
    """Return whether W&B finds a key, in a variable or from `wandb login`; else it would ask at the first step."""
    from requests.utils import get_netrc_auth  # W&B depends on it

    url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(url))


def loggers_of(config: Config, run: RunDirectory) -> list[Logger]:
    """Return the loggers of a run: metrics.jsonl always, W&B if `wandb.mode` is not off, and the others in `loggers`.

    A resumed run continues in the same run of each tracker: the directory keeps the ids of W&B and MLflow.
    """
    loggers: list[Logger] = [JsonLinesLogger(run.metrics)]
    if config.wandb.mode is not WandbMode.off:
        path = run.path / "wandb.json"
        if not path.exists():
            write_json(path, {"id": secrets.token_hex(4)})
        wandb_logger = WandbLogger(
            project=os.environ.get("WANDB_PROJECT", "replug"),
            name=os.environ.get("WANDB_NAME", run.path.name),
            id=json.loads(path.read_text())["id"],
            resume="allow",
            save_dir=run.path,
            offline=config.wandb.mode is WandbMode.offline,
        )
        loggers.append(wandb_logger)
    if LoggerName.tensorboard in config.loggers:
        loggers.append(TensorBoardLogger(run.path, name="", version="tensorboard", default_hp_metric=False))
    if LoggerName.mlflow in config.loggers:
        path = run.path / "mlflow.json"
        known = json.loads(path.read_text())["run_id"] if path.exists() else None
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "replug")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.path / 'mlflow.db').absolute()}"
        mlflow_logger = MLFlowLogger(project, run.path.name, uri, run_id=known)
        write_json(path, {"run_id": mlflow_logger.run_id})
        loggers.append(mlflow_logger)
    return loggers


def log_hyperparameters(logger: Logger, values: dict[str, Any]) -> None:
    """Log values by the full path of their keys; skip keys that MLflow has, since it refuses another value."""
    if isinstance(logger, MLFlowLogger):
        known = logger.experiment.get_run(logger.run_id).data.params
        values = {name: value for name, value in values.items() if name not in known}
    logger.log_hyperparams(values)


def publish_results(loggers: Sequence[Logger], run: RunDirectory, results: dict[str, Any]) -> None:
    """Log results by method and metric to every tracker; metrics.jsonl has rows of steps alone."""
    summary = {
        f"results/{method}/{metric}": entry["value"]
        for name in ("language_modelling", "retrieval")
        for method, of in results.get(name, {}).items()
        for metric, entry in of.items()
    }
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb  # takes seconds

            logger.experiment.summary.update(summary)
            wandb.finish()
        elif not isinstance(logger, JsonLinesLogger):
            logger.log_metrics(summary, results["weights"]["steps"])
            logger.save()
            logger.finalize("success")
