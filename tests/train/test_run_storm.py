"""Every kind of process of a run killed, again and again, with kill -9: the losses are the quiet run's.

A run of two trainer ranks on a cluster of nodes, with refreshes. Who dies is drawn: rank 0 (the command itself), the
other rank, a scorer, an embedder, a searcher, or a whole node with all that is on it. Where the run ended, the same
command goes on. `make storm` runs it at full size.
"""

import contextlib
import os
import random
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command_line import BASE, ROOT, start_process
from tests.support.local_cluster import local_cluster
from tests.support.runs import name_of, what_must_be_equal

pytestmark = pytest.mark.nightly

FULL = os.environ.get("REPLUG_STORM") == "full"
KINDS = ["rank 0", "TrainerRank", "Scorer", "Builder", "Searcher", "node"]
KILLS_OF_EACH = 20 if FULL else 1
STEPS = 400 if FULL else 24
OVERRIDES = [
    "resources.train=2",
    f"train.max_steps={STEPS}",
    "refresh.every_steps=6",
    "refresh.lag_steps=3",
    "checkpoint.every_steps=2",
]
SLOW = "lm.path=stand_in:0.5"  # sleeps so long in each call: steps that last, at no cost
# Ray asks a node every few seconds whether it lives, and several times before it believes that it does not.
QUICK_DEATHS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
MARK = "REPLUG_TEST_STORM"  # in the environment of every process of the storm, also of those whose parent is gone
ROOM = {"object_store_memory": 10**8}


def processes() -> list[psutil.Process]:
    """Every live process of this storm."""
    return [process for process in psutil.process_iter(["environ"]) if MARK in (process.info["environ"] or ())]


class Storm:
    """One run on a head and two nodes, killed until each kind has had its share, then left to end."""

    def __init__(self, cluster: Any, run: Path, overrides: list[str], seed: int) -> None:
        self._cluster, self._run, self._overrides = cluster, run, [*overrides, f"ray.address={cluster.address}"]
        self._nodes = [cluster.add_node(num_cpus=3, **ROOM) for _ in range(2)]
        self._random, self.killed, self.starts, self._hit_at = random.Random(seed), Counter[str](), 0, 0
        self._left = [kind for kind in KINDS for _ in range(KILLS_OF_EACH)]
        self._random.shuffle(self._left)

    def rage(self) -> None:
        """Three kills of four wait until the run is further than where it was hit last; the fourth may hit a start."""
        process = self._start()
        while self._left:
            if process.poll() is not None:
                assert process.returncode != 0, f"the run ended before the storm did: {self._left}"
                process = self._start()
            if len(self._left) % 4 == 0 or self._num_logged() > self._hit_at:
                time.sleep(self._random.uniform(0.1, 2.0))
                self._kill(self._left[-1], process)
            else:
                time.sleep(0.2)
        while process.wait(600) != 0:
            assert self.starts < 3 * len(KINDS) * KILLS_OF_EACH, "the run does not end any more"
            process = self._start()

    def _num_logged(self) -> int:
        """Steps that the run has logged; fewer again after it was resumed."""
        metrics = self._run / "metrics.jsonl"
        return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0

    def _start(self) -> subprocess.Popen:
        self.starts += 1
        ours = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")}
        process = start_process("train", ROOT / "configs/debug.yaml", f"run_dir={self._run}", *self._overrides, **ours)
        assert process.stdout is not None
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a pipe that nobody reads would stop it
        return process

    def _kill(self, kind: str, process: subprocess.Popen) -> None:
        if kind == "node":
            node = self._nodes.pop(self._random.randrange(2))
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            for each in [raylet, *raylet.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self._cluster.remove_node(node, allow_graceful=False)
            self._nodes.append(self._cluster.add_node(num_cpus=3, **ROOM))
        elif kind == "rank 0":
            process.kill()
            process.wait(30)
        else:
            actors = [process for process in processes() if name_of(process).startswith(f"ray::{kind}")]
            if not actors:
                return  # not there yet: another moment
            with contextlib.suppress(psutil.NoSuchProcess):
                self._random.choice(actors).kill()
        self._hit_at = self._num_logged()
        self.killed[kind] += 1
        self._left.pop()
        if len(self._left) % 12 == 0:
            print(f"{self.killed.total()} kills; the run is at step {self._hit_at}", flush=True)


@pytest.mark.timeout(5400 if FULL else 900)
def test_whoever_is_killed_the_losses_are_the_quiet_runs(finish, tmp_path, monkeypatch):
    quiet, run = tmp_path / "quiet", tmp_path / "run"
    finish(quiet, *OVERRIDES)
    for name, value in {**QUICK_DEATHS, MARK: "1"}.items():
        monkeypatch.setenv(name, value)
    same_data = ["data.source=null", f"data.prepared={quiet / 'data'}"]
    with local_cluster({"num_cpus": 1, **ROOM}) as cluster:
        storm = Storm(cluster, run, [*BASE, *OVERRIDES, SLOW, *same_data], seed=3)
        storm.rage()
    print(f"\n{storm.killed.total()} kills {dict(storm.killed)}; the command was started {storm.starts} times")
    assert storm.killed == Counter(dict.fromkeys(KINDS, KILLS_OF_EACH))
    assert what_must_be_equal(run) == what_must_be_equal(quiet)
    assert (run / "results.json").read_text() == (quiet / "results.json").read_text()
    _, left = psutil.wait_procs(processes(), timeout=60)
    names = [name_of(process) for process in left]
    for process in left:
        process.kill()
    assert names == []
