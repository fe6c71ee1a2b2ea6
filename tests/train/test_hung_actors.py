"""Whole runs with a process that is stopped and not dead: SIGTERM ends them in time, saved or with the reason said."""

import signal
import subprocess
import time

import psutil
import pytest

from tests.support.runs import descendants, metrics, name_of, wait_for_step

BY = "checkpoint.every_steps=100"  # so that nothing is saved but by the signal
SLOW = ("lm.path=stand_in:0.2", BY)  # so that the signal comes in the middle


def stop(process: subprocess.Popen, part_of_name: str) -> list[psutil.Process]:
    found = [child for child in descendants(process.pid) if part_of_name in name_of(child)]
    assert found, [name_of(child)[:60] for child in descendants(process.pid)]
    for child in found:
        child.suspend()
    return found


def ended(process: subprocess.Popen) -> tuple[str, float]:
    """What it said, and the seconds from SIGTERM on; nothing that it started may be left."""
    children = descendants(process.pid)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - begun
    assert process.returncode == 75, output
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left, [name_of(child) for child in left]
    return output, seconds


HUNG = {
    "searcher": ("Searcher", ()),
    "builder": ("Builder", ()),
    "scorer": ("Scorer", ()),
    "rank": ("TrainerRank", ("resources.train=2",)),
    "raylet": ("raylet/raylet", ()),
    "GCS": ("gcs_server", ()),
}
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in HUNG if name != "searcher"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["searcher", *NIGHTLY])
def test_sigterm_ends_a_run_of_which_something_hangs_in_30_seconds(begin, tmp_path, kind):
    name, keys = HUNG[kind]
    run = tmp_path / "run"
    process = begin(run, *SLOW, *keys)
    wait_for_step(run, 3, process)
    stop(process, name)
    time.sleep(3)  # until everything that can waits for it
    output, seconds = ended(process)
    print(f"\n{kind}: {seconds:.1f} s: {output.splitlines()[-1]}")
    assert seconds < 30
    saved = len(metrics(run))
    was_saved = f"saved step {saved}: the same command goes on from there" in output
    assert was_saved or "still waits in replug." in output
    if kind != "rank":
        assert was_saved
