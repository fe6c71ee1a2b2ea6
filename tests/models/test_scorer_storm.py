"""Replicas killed at random, with kill -9, during a scored epoch: every score is there, once, and as in a quiet one.

REPLUG_STORM=full runs the storms at full size (100 kills of stand-ins, some minutes); the default
is small enough for every change.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from replug.models.caching_lm import CachingLM
from replug.models.local.stand_in_lm import StandInSource
from replug.models.scorer_pool import ScorerPool

FULL = os.environ.get("REPLUG_STORM") == "full"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(1200 if FULL else 600)]


def scorer_processes() -> list[psutil.Process]:
    """Live replicas of this session, also those that are still starting."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Scorer"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


class Killer(threading.Thread):
    """Kills a random replica now and then until it has killed `kills`, or is told to stop."""

    def __init__(self, kills: int, every_seconds: float) -> None:
        super().__init__(daemon=True)
        self.left, self.killed, self._every = kills, 0, every_seconds
        self._random, self.stop = random.Random(0), threading.Event()

    def run(self) -> None:
        while self.left and not self.stop.wait(self._random.uniform(0.5, 1.5) * self._every):
            if processes := scorer_processes():
                os.kill(self._random.choice(processes).pid, signal.SIGKILL)
                self.left, self.killed = self.left - 1, self.killed + 1


def epoch(
    source: StandInSource, path: Path, replicas: int, calls: list, killer: Killer | None
) -> tuple[list, float, ScorerPool]:
    """All calls through a pool behind a cache: the scores, how long it took once all replicas were up, and the pool."""
    pool = ScorerPool(source, replicas, threads=1, max_attempts=20)
    while pool.pool.num_up < replicas:
        time.sleep(0.05)
    cached = CachingLM(pool, path)
    if killer:
        killer.start()
    start = time.monotonic()
    futures = [cached.submit(prefixes, continuations) for prefixes, continuations in calls]
    scores = [[s.token_logprobs.tobytes() for s in future.result(1000)] for future in futures]
    seconds = time.monotonic() - start
    if killer:
        killer.stop.set()
        killer.join()
    assert cached.num_misses == sum(len(prefixes) for prefixes, _ in calls)  # each was asked for once
    cached.close()
    return scores, seconds, pool


def storm(tmp_path: Path, source: StandInSource, replicas: int, calls: list, kills: int, every_seconds: float) -> None:
    quiet, quiet_seconds, pool = epoch(source, tmp_path / "quiet.sqlite", replicas, calls, None)
    pool.close()
    killer = Killer(kills, every_seconds)
    scores, seconds, pool = epoch(source, tmp_path / "storm.sqlite", replicas, calls, killer)
    counts = pool.pool.counts
    pool.close()
    print(
        f"\n{killer.killed} kills, {counts.respawns} respawns, {counts.retries} calls done again; "
        f"quiet {quiet_seconds:.1f} s, storm {seconds:.1f} s ({seconds / quiet_seconds:.2f}x)"
    )
    assert scores == quiet
    assert killer.killed == kills
    assert counts.respawns >= kills * 0.9  # one that is killed while it starts may be counted with the next
    assert not FULL or seconds < 2 * quiet_seconds


def test_a_storm_over_stand_ins_changes_no_score(tmp_path):
    num_calls, replicas, kills, every = (8000, 8, 100, 1.5) if FULL else (250, 2, 3, 1.5)
    calls = [([f"a{i} b c", f"c d{i}", f"e {i} f"], [f" b {i}", " c", " f g"]) for i in range(num_calls)]
    storm(tmp_path, StandInSource(0.2 if FULL else 0.1), replicas, calls, kills, every)
