"""Commands without Ray where that will do, evaluations as they are typed, and how far one is."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.schema import Config
from replug.index_workers.builder import Builder
from replug.index_workers.searcher import Searcher
from replug.index_workers.service import IndexService
from replug.models.lm_source import LocalSource
from replug.train import workers
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

    def release(self, keep: list[int]) -> None:
        self._one.release(keep)

    def close(self) -> None: ...


def _laid_out_here(config: Config | EvaluationConfig, *_: Any, **__: Any) -> AbstractContextManager:
    if isinstance(config, Config):
        config = replace(config, resources=replace(config.resources, train=1))
    return nullcontext(config)


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
        for module in ("cluster.ray_cluster", "evals.run", "train.workers"):
            patch.setattr(f"replug.{module}.ray_cluster", _laid_out_here)
        patch.setattr(workers, "require_seen_by_all", lambda *_: None)
        patch.setattr(workers, "scorer_actors", lambda: (1, 0.0))
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
