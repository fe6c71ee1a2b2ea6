"""The real command line on stand-ins, as a user would type it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
STEPS = 24
BASE = [
    "refresh.every_steps=6",
    "refresh.lag_steps=3",
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=4",
    "evaluate.num_resamples=200",
    "train.pipeline_depth=2",
    "index.threads_per_worker=1",
    "train.threads=1",
]


def start(run: Path, *overrides: str, command: str = "train", config: str = "debug") -> subprocess.Popen:
    """The real command line in a session of its own, without what the tests tell Ray."""
    arguments = [
        sys.executable,
        "-m",
        "replug.commands.cli",
        command,
        str(ROOT / f"configs/{config}.yaml"),
        f"run_dir={run}",
    ]
    return subprocess.Popen(
        [*arguments, *(BASE if config == "debug" else ()), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    )


def finish(run: Path, *overrides: str, command: str = "train", config: str = "debug") -> str:
    """As `start`, waited for; returns what was printed."""
    process = start(run, *overrides, command=command, config=config)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    return output
