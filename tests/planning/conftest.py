"""Configurations to plan, and run directories as a finished run leaves them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.config.load import config_to_yaml, load_config
from replug.config.schema import Config

ROOT = Path(__file__).parents[2]
STAND_INS = ["data.num_documents=600", "lm.path=stand_in:0.5", "index.threads_per_worker=1", "train.threads=1"]


@pytest.fixture
def paper() -> Config:
    return load_config(ROOT / "configs/paper.yaml")


@pytest.fixture
def run_dir(tmp_path: Path) -> Callable[..., Path]:
    """Writes the directory of a run of `debug.yaml` whose LM is slow: every step waits for it."""

    def write(*overrides: str, **changed: float | None) -> Path:
        folder = tmp_path / "measured"
        folder.mkdir(exist_ok=True)
        config = load_config(ROOT / "configs/debug.yaml", [*STAND_INS, f"run_dir={folder}", *overrides])
        if hasattr(config.evaluate, "refresh_windows"):
            config.evaluate.refresh_windows = 0  # the rows below have none
        rows = [measured_row(step, config, changed) for step in range(config.train.max_steps)]
        training = sum(row.get("time/step_seconds", 0.0) for row in rows)
        times = {"start_up": 6.0, "first_index": 5.0, "training": training + 1.0, "last_index": 4.0, "measuring": 8.0}
        (folder / "config.yaml").write_text(config_to_yaml(config))
        (folder / "environment.json").write_text(json.dumps({"cores": 2}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "run_times.json").write_text(json.dumps({**times, "total": sum(times.values())}))
        return folder

    return write


def measured_row(step: int, config: Config, changed: dict[str, float | None]) -> dict[str, float]:
    """A step of half a second in the LM and 0.1 s in the trainer, which it hides; 64 pairs of 48 tokens.

    The first step waits for its own batch only, and trains before it ends: the LM is then 0.1 s into the next.
    """
    pairs = config.train.batch_size * config.retrieve.k
    lag, every = config.refresh.lag_steps or 0, config.refresh.every_steps
    swapped = step > every and step % every == lag
    submitted = min(step + 1 + config.train.pipeline_depth, config.train.max_steps)
    row: dict[str, float | None] = {
        "step": step,
        "time/step_seconds": 0.5 if step else 0.65,
        "time/retrieve_seconds": 0.02,
        "time/search_seconds": 0.01,
        "time/wait_scores_seconds": 0.38,
        "time/wait_index_seconds": 0.0,
        "time/train_seconds": 0.1,
        "time/checkpoint_seconds": 0.03 if step and step % config.checkpoint.every_steps == 0 else 0.0,
        "scoring/tokens_per_second": pairs * 48 / 0.5,
        "scoring/replica_0/tokens_per_second": pairs * 48 / 0.5,
        "scoring/replicas": 1.0,
        "scoring/busy_share": 1.0,
        "scoring/misses": float(pairs * submitted),
        "index/swapped": float(swapped),
        "index/swap_build_seconds": 1.2,
        **{key.replace("__", "/"): value for key, value in changed.items()},
    }
    return {key: value for key, value in row.items() if value is not None}
