"""Weights & Biases by way of Lightning's logger: off, offline (no account, no network) or online.

Only rank 0 has loggers. A run directory has one W&B run, however often it is resumed. W&B reads its own variables,
such as WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP.
"""

import json
import os
import secrets
from collections.abc import Sequence

import wandb
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import Logger

from replug.config.load import flatten
from replug.config.schema import Config
from replug.data.files import write_json
from replug.train.evaluation import LANGUAGE_MODELLING, RETRIEVAL
from replug.train.run_dir import RunDirectory


def wandb_logger(config: Config, run: RunDirectory) -> WandbLogger:
    """Return the W&B run of a run directory, whose id is kept there."""
    path = run.path / "wandb.json"
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    return WandbLogger(
        project=os.environ.get("WANDB_PROJECT", "replug"),
        name=os.environ.get("WANDB_NAME", run.path.name),
        id=json.loads(path.read_text())["id"],
        resume="allow",
        save_dir=run.path,
        offline=config.wandb.mode.value == "offline",
        config=flatten(config),
    )


def publish_results(loggers: Sequence[Logger], run: RunDirectory, results: dict) -> None:
    """Write results into the run's summary by method and metric, and the tuned retriever as an artifact."""
    heldout = results.get(LANGUAGE_MODELLING, {})
    summary = {
        f"results/{method}/{metric}": entry["value"]
        for evaluated in (heldout, results.get(RETRIEVAL, {}))
        for method, of in evaluated.items()
        for metric, entry in of.items()
    }
    bpb = {method: of["bpb"]["value"] for method, of in heldout.items()}
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(summary)
            artifact = wandb.Artifact(f"retriever-{logger.version}", type="model", metadata=bpb)
            artifact.add_dir(str(run.retriever))
            logger.experiment.log_artifact(artifact)
            wandb.finish()
