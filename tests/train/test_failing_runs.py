"""Whole runs whose refreshes fail: full disks, kill -9, builders that stand still."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from replug.index_workers.version_store import VersionStore
from tests.support.command_line import STEPS
from tests.support.index_versions import flip, written_before
from tests.support.runs import descendants, metrics, name_of, what_must_be_equal
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.nightly


def wait_until(process: subprocess.Popen, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def end(process: subprocess.Popen, status: int) -> str:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == status, output
    return output


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=60)


def steps_done(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def builders_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in descendants(process.pid) if "Builder" in name_of(child)]


def stop_builders(process: subprocess.Popen, count: int = 2) -> list[psutil.Process]:
    """All of them: one may have begun the run while the other was still being started."""
    wait_until(process, lambda: len(builders_of(process)) == count)
    builders = builders_of(process)
    for builder in builders:
        builder.suspend()
    return builders


SLOW = "lm.path=stand_in:0.15"


@pytest.mark.root
def test_a_run_whose_disk_fills_up_stops_with_the_cause_and_goes_on_when_there_is_space(begin, finish, tmp_path):
    """Its losses are no quiet run's from there on: the refresh that failed was not adopted at its lag."""
    run = tmp_path / "run"
    with small_disk(run / "index", megabytes=4) as disk:
        process = begin(run, SLOW)
        wait_until(process, lambda: steps_done(run) >= 2)
        disk.leave(
            written_before(VersionStore(run / "index"), VersionStore(run / "index").plan(0), "vectors-00004.npy")
        )
        output = end(process, status=1)
        last = output.splitlines()[-1]
        assert re.search(r"^replug: step 19: index v0 is 19 steps old, more than 3 x refresh.every_steps \(18\)", last)
        assert re.search(r"v000001/vectors-0000\d\.\S+ cannot be written: No space left on device$", last)
        assert "saved step 19: the same command goes on from there" in output
        assert "Traceback" not in output
        disk.free()
        assert "resuming at step 19" in finish(run, SLOW)
        rows = metrics(run)
        assert [row["step"] for row in rows] == list(range(STEPS))
        assert [row["step"] for row in rows if row["index/swapped"]] == [11, 15, 21]
        assert sorted(path.name for path in (run / "index").glob("v*")) == ["v000003", "v000004"]


LOSSY_KEYS = [SLOW, "index.kind=IVF8,SQ8", "index.num_shards=2", "resources.index=2"]


@pytest.mark.timeout(900)
def test_killed_in_a_refresh_of_a_lossy_kind_the_resumed_run_has_the_same_losses(begin, finish, tmp_path):
    """In the first refresh, which takes over version 0's quantizer, and in the second, by a file just written."""
    quiet, run = tmp_path / "quiet", tmp_path / "run"
    finish(quiet, *LOSSY_KEYS)
    kills = [(1, 6, "vectors-00003.json"), (2, 12, "quantizer.faiss"), (2, 12, "vectors-00008.json")]
    for version, started_at, file in kills:
        process = begin(run, *LOSSY_KEYS)
        folder = run / f"index/v{version:06d}"
        wait_until(process, lambda step=started_at: steps_done(run) >= step - 2)
        builders = stop_builders(process)
        wait_until(process, lambda step=started_at: steps_done(run) > step)
        for builder in builders:
            builder.resume()
        wait_until(process, (folder / file).exists)
        kill(process)
        assert not (folder / "manifest.json").exists(), "the refresh was done before the kill"
    damaged = run / "index/v000001/vectors-00002.npy"
    flip(damaged)
    assert re.search(rf"replug: {damaged} is damaged", end(begin(run, *LOSSY_KEYS), status=2))
    flip(damaged)
    assert "resuming at step" in finish(run, *LOSSY_KEYS)
    assert what_must_be_equal(run) == what_must_be_equal(quiet)
    assert (run / "results.json").read_text() == (quiet / "results.json").read_text()
