"""A rank that hangs or fails ends the collectives of rank 0; a signal ends a run of which something hangs."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from replug.config.errors import RunError
from replug.train.ranks import other_ranks
from tests.support.runs import descendants, metrics, name_of, wait_for_step

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("hangs", [True, False], ids=["stopped", "fails"])
def test_a_rank_that_hangs_or_fails_ends_a_collective(ray_session, tmp_path, hangs):
    """Rank 0 is this process. It waits in an all-reduce. A rank that fails is named long before the time-out."""

    def join(environment) -> dist.ProcessGroup:
        environment.join("gloo", timedelta(minutes=10))
        group = dist.new_group(timeout=timedelta(seconds=20) if hangs else timedelta(minutes=10))
        dist.all_reduce(torch.ones(1), group=group)
        return group

    def reduce_for_ever(folder: Path, fails: bool, environment) -> None:
        group = join(environment)
        (folder / "partial").write_text(str(os.getpid()))
        (folder / "partial").rename(folder / "pid")
        if fails:
            raise ValueError("of its own")
        while True:
            dist.all_reduce(torch.ones(1), group=group)

    said = "the trainer's ranks do not reach each other" if hangs else "trainer rank 1 died: .*of its own"
    with (
        pytest.raises(RunError, match=rf"{said}.*; the same command goes on from the newest checkpoint"),
        other_ranks(partial(reduce_for_ever, tmp_path, not hangs), 2, 0.0, 1) as others,
    ):
        group = join(others.environment)
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        if hangs:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        while True:
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["Searcher", pytest.param("gcs_server", marks=pytest.mark.nightly)])
def test_sigterm_ends_a_run_of_which_something_hangs_in_30_seconds(begin, tmp_path, name):
    """Nothing is saved but by the signal, which comes in the middle of a slow step, and no process is left."""
    run = tmp_path / "run"
    process = begin(run, "lm.path=stand_in:0.2", "checkpoint.every_steps=100")
    wait_for_step(run, 3, process)
    children = descendants(process.pid)
    hung = [child for child in children if name in name_of(child)]
    assert hung, [name_of(child)[:60] for child in children]
    for child in hung:
        child.suspend()
    time.sleep(3)  # until everything that can waits for it
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75 and time.monotonic() - begun < 30, output
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert f"saved step {len(metrics(run))}: the same command goes on from there" in output
