"""Evaluations as they are typed, on a finished run; and how far one is."""

import subprocess
import time
from pathlib import Path

from tests.support.command_line import ROOT


def typed(name: str, *overrides: str) -> list[str]:
    return ["evaluate", str(ROOT / f"configs/eval_{name}.yaml"), "num_resamples=200", *overrides]


def on_run(run: Path) -> list[str]:
    """The texts and documents of a run, its retriever before and after, stand-ins for the rest."""
    return [
        *(f"data.{key}={value}" for key, value in {"source": "null", "prepared": run / "data"}.items()),
        "retriever.path=stand_in",
        f"retrievers.lsr={run / 'retriever'}",
        "lm.path=stand_in",
        "index.dtype=float32",
    ]


def wait_for_lines(process: subprocess.Popen, path: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while not path.exists() or len(path.read_bytes().splitlines()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
