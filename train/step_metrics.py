"""Log the steps of a run: their time by cause, the rows of metrics.jsonl, and trackers."""

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger

from replug.config.choices import LoggerName, WandbMode
from replug.config.errors import RunError, UserError, require_extra
from replug.config.schema import Config
from replug.data.files import write_json
from replug.train.run_dir import RunDirectory

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
