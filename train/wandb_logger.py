"""Weights & Biases by way of Lightning's logger: off, offline (no account, no network) or online."""

import json
import secrets

from pytorch_lightning.loggers import WandbLogger

from configs.load import flatten
from configs.schema import Config
from data.files import write_json
from train.run_dir import RunDirectory


def wandb_logger(config: Config, run: RunDirectory) -> WandbLogger:
    """One W&B run for one run directory, however often it is resumed: its id is kept there."""
    return WandbLogger(
        project=config.wandb.project,
        entity=config.wandb.entity,
        name=config.wandb.name or run.path.name,
        id=_run_id(run),
        resume="allow",
        save_dir=run.path,
        offline=config.wandb.mode.value == "offline",
        config=flatten(config),
    )


def _run_id(run: RunDirectory) -> str:
    path = run.path / "wandb.json"
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    return json.loads(path.read_text())["id"]
