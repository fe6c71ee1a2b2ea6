"""Weights & Biases by way of Lightning's logger: off, offline (no account, no network) or online.

Only rank 0 has loggers. A run directory has one W&B run, however often it is resumed.
"""

import json
import secrets
from collections.abc import Sequence

import wandb
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import Logger

from replug.config.load import flatten
from replug.config.schema import Config
from replug.data.files import write_json
from replug.train.run_dir import RunDirectory


def wandb_logger(config: Config, run: RunDirectory) -> WandbLogger:
    """The W&B run of a run directory: its id is kept there."""
    return WandbLogger(
        project=config.wandb.project,
        entity=config.wandb.entity,
        name=config.wandb.name or run.path.name,
        group=config.wandb.group,
        id=_run_id(run),
        resume="allow",
        save_dir=run.path,
        offline=config.wandb.mode.value == "offline",
        config=flatten(config),
    )


def publish_results(loggers: Sequence[Logger], run: RunDirectory, results: dict) -> None:
    """Bits per byte and intervals into the run's summary, and the tuned retriever as an artifact."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(_summary(results))
            artifact = wandb.Artifact(
                f"retriever-{logger.version}", type="model", metadata=results.get("bpb", {}).get("all")
            )
            artifact.add_dir(str(run.retriever))
            logger.experiment.log_artifact(artifact)
            wandb.finish()


def _summary(results: dict) -> dict[str, float]:
    bpb = {f"results/bpb/{domain}/{m}": v for domain, row in results.get("bpb", {}).items() for m, v in row.items()}
    ends = {
        f"results/{name}/{end}": value
        for name, interval in results.get("intervals", {}).items()
        for end, value in zip(("low", "high"), interval, strict=True)
    }
    return bpb | ends


def _run_id(run: RunDirectory) -> str:
    path = run.path / "wandb.json"
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    return json.loads(path.read_text())["id"]
