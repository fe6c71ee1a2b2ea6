"""Log the steps of a run: their time by cause, the work of each device, the rows of metrics.jsonl, and trackers."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from replug.cluster.gpus import USE, Busy, BusySeconds, DeviceUse, add_seconds
from replug.config.choices import LoggerName, WandbMode
from replug.config.errors import RunError, UserError, require_extra
from replug.config.load import flatten
from replug.config.schema import Config
from replug.config.wandb_login import wandb_login
from replug.data.datamodule import Position
from replug.data.files import write_json
from replug.train.run_dir import RunDirectory

ROWS = 100  # of a run's device_use.jsonl, at least: few enough to look at, and small where there are many devices
CAUSES = ("retrieve", "wait_scores", "wait_index", "refresh", "checkpoint")  # of the main thread; the rest is training


class StepClock:
    """Counts seconds of the main thread by cause since the last `read`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + time.monotonic() - start

    def read(self) -> dict[str, float]:
        """Return `time/CAUSE_seconds` of the step that ends now, and its length."""
        now = time.monotonic()
        seconds, self._seconds = self._seconds, {}
        whole, self._began = now - self._began, now
        causes = {cause: seconds.get(cause, 0.0) for cause in CAUSES}
        causes |= {"train": max(0.0, whole - sum(causes.values())), "step": whole}
        return {f"time/{cause}_seconds": value for cause, value in causes.items()}


class DeviceShares(pl.Callback):
    """Writes what each device did meanwhile to `device_use.jsonl`, and the metrics `devices/...`. Rank 0's.

    A row of the file covers some steps: the last one, their seconds, and the busy seconds by device and role. Work
    counts in the steps in which its result arrived. Roles that take turns on a GPU may add up above 1. All ranks count
    as working while rank 0 trains. `ranks` gives the devices of each rank, rank 0's first.
    """

    def __init__(
        self, path: Path, max_steps: int, ranks: Callable[[], Sequence[tuple[str, ...]]], use: DeviceUse = USE
    ) -> None:
        self._path, self._ranks, self._use = path, ranks, use
        self._every = max(1, max_steps // ROWS)
        self._seconds = 0.0
        self._busy: BusySeconds = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._use.take()  # of before the first step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        times = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("time/")}
        for rank, devices in enumerate(self._ranks()):
            encoded = times["time/retrieve_seconds"] if rank == 0 else 0.0
            self._use.note("train", Busy(times["time/train_seconds"] + encoded, devices))
        self._seconds += times["time/step_seconds"]
        for device, role, seconds in _flat(self._use.take()):
            add_seconds(self._busy, device, role, seconds)
        if (batch.step + 1) % self._every == 0 or batch.step + 1 == trainer.max_steps:
            self._write(trainer, batch.step)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy, since a checkpoint is written while the next steps go on."""
        return {"seconds": self._seconds, "busy": deepcopy(self._busy)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds, self._busy = state_dict["seconds"], deepcopy(state_dict["busy"])

    def _write(self, trainer: pl.Trainer, step: int) -> None:
        append_row(self._path, {"step": step, "seconds": self._seconds, "busy": self._busy})
        shares = {f"devices/{device}/{role}": busy / self._seconds for device, role, busy in _flat(self._busy)}
        for logger in trainer.loggers:
            if not isinstance(logger, JsonLinesLogger):  # whose rows are of one step each
                logger.log_metrics(shares, step)
        self._seconds, self._busy = 0.0, {}


def _flat(busy: BusySeconds) -> Iterable[tuple[str, str, float]]:
    return [(device, role, seconds) for device, roles in busy.items() for role, seconds in roles.items()]


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
        """Do nothing: the run directory's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        append_row(self._path, {"step": step, **{k: v for k, v in metrics.items() if k != "epoch"}})


def require_loggers(config: Config) -> None:
    """Raise UserError, before anything heavy starts, for a tracker that is not installed, or W&B without a login."""
    for name in config.loggers:
        require_extra(name, name, what=f"loggers=[{name}]")
    if config.wandb.mode is not WandbMode.off:
        require_extra("wandb", "wandb", what=f"wandb.mode={config.wandb.mode}")
    if config.wandb.mode is WandbMode.online and wandb_login() is None:
        raise UserError("wandb.mode is online, and W&B has no key; run `wandb login`, or set $WANDB_API_KEY")


def loggers_of(config: Config, run: RunDirectory) -> list[Logger]:
    """Return the loggers of a run: metrics.jsonl always, W&B if `wandb.mode` is not off, and those of `loggers`.

    A run directory has one run of each tracker, however often it is resumed; W&B's and MLflow's id is kept there.
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


def log_configuration(loggers: Sequence[Logger], config: Config) -> None:
    """Log every key's full path and value as hyperparameters."""
    for logger in loggers:
        _log_new(logger, flatten(config))


def _log_new(logger: Logger, values: dict[str, Any]) -> None:
    """Log hyperparameters; MLflow refuses another value of one that a run has."""
    if isinstance(logger, MLFlowLogger):
        known = logger.experiment.get_run(logger.run_id).data.params
        values = {name: value for name, value in values.items() if name not in known}
    logger.log_hyperparams(values)


def publish_results(loggers: Sequence[Logger], run: RunDirectory, results: dict[str, Any]) -> None:
    """Log results by method and metric, and the verdict, to every tracker; the tuned retriever as W&B's artifact.

    metrics.jsonl has rows of steps alone.
    """
    evaluations = [results[name] for name in ("language_modelling", "retrieval") if name in results]
    summary = {
        f"results/{method}/{metric}": entry["value"]
        for evaluated in evaluations
        for method, of in evaluated.items()
        for metric, entry in of.items()
    }
    verdict = results["verdict"]
    words = {"verdict": verdict["verdict"], "verdict_sentence": verdict["sentence"]} if verdict else {}
    for logger in loggers:
        if isinstance(logger, JsonLinesLogger):
            continue
        if isinstance(logger, TensorBoardLogger):  # it shows the first hyperparameters alone
            for name, text in words.items():
                logger.experiment.add_text(name, text)
        elif not isinstance(logger, WandbLogger):
            _log_new(logger, words)
        if not isinstance(logger, WandbLogger):
            logger.log_metrics(summary, results["weights"]["steps"])
            logger.save()
            logger.finalize("success")
        else:
            import wandb  # takes seconds

            logger.experiment.summary.update(summary | words)
            artifact = wandb.Artifact(f"retriever-{logger.version}", type="model")
            artifact.add_dir(str(run.retriever))
            logger.experiment.log_artifact(artifact)
            wandb.finish()


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one line of JSON. Raises RunError if it cannot be written."""
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
