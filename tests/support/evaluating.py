"""Evaluations as they are typed, on a finished run; and how far one is."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.models.lm_source import LocalSource
from tests.support.command_line import ROOT, CommandLine, start_process


def typed(name: str, *overrides: str) -> list[str]:
    return ["evaluate", str(ROOT / f"configs/eval_{name}.yaml"), *overrides]


def on_run(run: Path) -> list[str]:
    """The texts and documents of a run, its retriever before and after, stand-ins for the rest."""
    return [
        *(f"data.{key}={value}" for key, value in {"source": "null", "prepared": run / "data"}.items()),
        "retriever.path=stand_in",
        f"retrievers.lsr={run / 'retriever'}",
        "lm.path=stand_in",
        "index.dtype=float32",
    ]


def evaluated(replug: CommandLine, out: Path, *words: str) -> tuple[dict, str]:
    """Run an evaluation to a good end; return its results and what was printed."""
    ended = replug(*words)
    assert ended.status == 0, ended.printed
    return next(iter(json.loads((out / "results.json").read_text()).values())), ended.printed


def open_lms_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open local LMs in this process, so that nothing waits for Ray."""
    monkeypatch.setattr(LocalSource, "roles", ())
    monkeypatch.setattr(LocalSource, "open", lambda self, lm, second=None: self.open_here())


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def kill_at(count: int, num: Callable[[], int], *words: str) -> int:
    """Start a command, kill -9 it when there are so many lines or files, and return how many there are then."""
    process, deadline = start_process(*words), time.monotonic() + 300
    while num() < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return num()
