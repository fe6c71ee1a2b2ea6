"""A rank that hangs is found by its silence, killed, and named: rank 0 waits for it in a collective no longer."""

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
from replug.train import ranks
from replug.train.ranks import Heartbeats, beating, other_ranks
from tests.support.runs import descendants, metrics, name_of, wait_for_step

pytestmark = pytest.mark.slow


def test_a_rank_is_silent_from_its_last_beat_on(monkeypatch):
    monkeypatch.setattr(ranks, "BEAT_SECONDS", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = Heartbeats("127.0.0.1", store.port)
    assert heard.silent_seconds(1) == 0, "it has not begun"
    with beating(1, "127.0.0.1", store.port):
        while not store.check(["replug/heartbeat/1"]):
            time.sleep(0.01)
        for _ in range(3):
            count = store.add("replug/heartbeat/1", 0)
            while store.add("replug/heartbeat/1", 0) == count:
                time.sleep(0.01)
            assert heard.silent_seconds(1) == 0, "it has counted on since"
    while heard.silent_seconds(1) < 0.2:  # the last beat may still be on its way
        time.sleep(0.05)


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("hangs", [True, False], ids=["stopped", "fails"])
def test_a_rank_that_hangs_or_fails_ends_a_collective_and_is_named(ray_session, monkeypatch, tmp_path, hangs):
    """Rank 0 is this process. It waits in an all-reduce, whose own time limit is far off."""
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 6.0 if hangs else 120.0)

    def join(environment):
        environment.join("gloo", timedelta(minutes=10))

    def reduce_for_ever(folder: Path, fails: bool, environment) -> None:
        join(environment)
        dist.all_reduce(torch.ones(1))
        (folder / "partial").write_text(str(os.getpid()))
        (folder / "partial").rename(folder / "pid")
        if fails:
            raise ValueError("of its own")
        while True:
            dist.all_reduce(torch.ones(1))

    said = "trainer rank 1 hangs: no sign of life for" if hangs else "trainer rank 1 died: .*of its own"
    with (
        pytest.raises(RunError, match=rf"{said}.*; the same command goes on from the newest checkpoint"),
        other_ranks(partial(reduce_for_ever, tmp_path, not hangs), 2, 0.0, 1) as others,
    ):
        join(others.environment)
        dist.all_reduce(torch.ones(1))
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        if hangs:
            while not others.environment.store.check(["replug/heartbeat/1"]):
                time.sleep(0.02)
            time.sleep(1.5)  # for the watcher, which looks each second, to hear it
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        while True:
            dist.all_reduce(torch.ones(1))


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
