"""An offline W&B run is read back from what was written: no account, no network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from train.run_dir import RunDirectory
from train.wandb_logger import wandb_logger

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(120)
def test_an_offline_run_holds_what_was_logged_under_one_id(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(ROOT / "configs/debug.yaml", [f"run_dir={tmp_path}", "wandb.mode=offline"])
    run = RunDirectory(tmp_path)
    logger = wandb_logger(config, run)
    logger.log_metrics({"train/loss": 0.25}, step=3)
    logger.finalize("success")
    wandb.finish()
    assert wandb_logger(config, run).version == logger.version, "a resumed run keeps its id"

    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json"]
    log = next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    summary = subprocess.run([*command, str(log)], capture_output=True, text=True, check=True, timeout=60).stdout
    assert find(json.loads(summary), "train/loss") == 0.25
    assert find(json.loads(summary), "loss.beta") is not None


def find(tree: object, key: str) -> object:
    """The first value under a key, however deep."""
    if isinstance(tree, dict):
        if key in tree:
            return tree[key]
        found = [find(value, key) for value in tree.values()]
        return next((value for value in found if value is not None), None)
    return None
