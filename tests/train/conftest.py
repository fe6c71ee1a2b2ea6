"""A prepared set of the debug configuration, a module on its tiny encoder, a run on two ranks, runs that are killed."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from replug.config.schema import Config
from replug.data.records import ScoredBatch
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.train.module import LSRModule
from tests.support.command_line import start
from tests.support.made_once import made_once
from tests.support.preparing import debug_set
from tests.support.runs import descendants, name_of, wait_for_step
from tests.support.training import Given, InlineLM, made_module, pipeline_for


@pytest.fixture
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """That of configs/debug.yaml, which is made once; each test opens it anew."""
    return PreparedSet(made_once(tmp_path_factory, "debug", debug_set) / "set")


@pytest.fixture
def module(debug_config: Config, data: PreparedSet) -> LSRModule:
    torch.manual_seed(0)
    return made_module(debug_config, data)


@pytest.fixture
def scored(module: LSRModule, data: PreparedSet) -> ScoredBatch:
    """The first batch, found and scored by the module itself, which gets it at every step and logs nothing."""
    pipeline = pipeline_for(module, data, InlineLM())
    pipeline.advance(0, IndexState(0, 0))
    batch = pipeline.take(0)
    module.batches = Given(batch)
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return batch


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, finish: Callable[..., str]) -> Path:
    """A finished run on two ranks with every logger; rank 1 was killed after step 9, and the run resumed.

    What the two commands printed is in files beside it, `.killed` (with its exit status before it) and `.resumed`.
    """
    keys = ("resources.train=2", "wandb.mode=offline")

    def make(run: Path) -> None:
        process = start(run, *keys)
        wait_for_step(run, 9, process)
        next(child for child in descendants(process.pid) if "TrainerRank" in name_of(child)).kill()
        output, _ = process.communicate(timeout=300)
        run.with_suffix(".killed").write_text(f"{process.returncode}\n{output}")
        run.with_suffix(".resumed").write_text(finish(run, *keys))

    return made_once(tmp_path_factory, "two-ranks", make)


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen]]:
    """As `start`; what is left of a test that failed is killed, stopped builders too."""
    processes: list[subprocess.Popen] = []

    def begin(run: Path, *overrides: str) -> subprocess.Popen:
        processes.append(start(run, *overrides))
        return processes[-1]

    yield begin
    for process in processes:
        for each in [*descendants(process.pid), psutil.Process(process.pid)] if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
