"""Evaluations as they are typed, without Ray where that will do, on a finished run; and how far one is."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from replug.index_workers.builder import Builder
from replug.index_workers.searcher import Searcher
from replug.index_workers.service import IndexService
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


class _Here:
    """One object of this process in place of the builders' pool, or of the searchers."""

    def __init__(self, make: Callable[[int], Any], *_: Any, **__: Any) -> None:
        self._one = make(0)
        self.search = getattr(self._one, "search", None)

    def submit(self, method: str, *arguments: Any) -> Future:
        done: Future = Future()
        done.set_result(getattr(self._one, method)(*arguments))
        return done

    def load(self, version: int, num_documents: int) -> None:
        assert self._one.load(version) == num_documents

    def close(self) -> None: ...


@contextmanager
def without_ray() -> Iterator[CommandLine]:
    """Yield the command line; its local LMs, builders and searchers are objects of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSource, "roles", ())
        patch.setattr(LocalSource, "open", lambda self, lm, second=None: self.open_here())
        patch.setattr(IndexService, "_make_builder", lambda self, _: Builder(self.store.root, 1))
        patch.setattr(IndexService, "_make_searcher", lambda self, _: Searcher(self.store.root, 0, 1, 1, "cpu"))
        for name in ("ActorPool", "SearcherGroup"):
            patch.setattr(f"replug.index_workers.service.{name}", _Here)
        for module in ("cluster.ray_cluster", "evals.run"):
            patch.setattr(f"replug.{module}.ray_cluster", lambda config, **_: nullcontext(config))
        yield CommandLine(lambda: "auto")


def evaluated(replug: CommandLine | None, out: Path, *words: object) -> tuple[dict, str]:
    """Run an evaluation to a good end, without Ray if no command line is given; return its results and its output."""
    with nullcontext(replug) if replug else without_ray() as line:
        ended = line(*words)
    assert ended.status == 0, ended.printed
    return next(iter(json.loads((out / "results.json").read_text()).values())), ended.printed


def evaluated_here(name: str, out: Path, *overrides: str) -> tuple[dict, str]:
    return evaluated(None, out, *typed(name, f"out={out}", *overrides))


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
