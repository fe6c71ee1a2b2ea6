"""Whole runs that are killed in a refresh, at chosen files; `test_run_storm.py` kills at random."""

import re
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.support.command_line import wait_for
from tests.support.index_versions import flip
from tests.support.runs import descendants, name_of, what_must_be_equal

pytestmark = pytest.mark.nightly
LOSSY_KEYS = ["lm.path=stand_in:0.15", "index.kind=IVF8,SQ8", "index.num_shards=2", "resources.index=2"]


def wait_until(process: subprocess.Popen, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.mark.timeout(900)
def test_killed_in_a_refresh_of_a_lossy_kind_the_resumed_run_has_the_same_losses(begin, finish, tmp_path):
    """In the first refresh, which takes over version 0's quantizer, and in the second, by a file just written."""
    quiet, run = tmp_path / "quiet", tmp_path / "run"
    finish(quiet, *LOSSY_KEYS)
    for version, started_at, file in (
        (1, 6, "vectors-00003.json"),
        (2, 12, "quantizer.faiss"),
        (2, 12, "vectors-00004.json"),
    ):
        process = begin(run, *LOSSY_KEYS)

        def has_done(steps: int) -> bool:
            written = run / "metrics.jsonl"
            return written.exists() and len(written.read_text().splitlines()) >= steps

        def builders(of: int = process.pid) -> list:
            return [child for child in descendants(of) if "Builder" in name_of(child)]

        folder = run / f"index/v{version:06d}"
        wait_until(process, lambda steps=started_at - 2: has_done(steps))
        wait_until(process, lambda: len(builders()) == 2)  # one may have begun while the other was being started
        stopped = builders()
        for builder in stopped:
            builder.suspend()
        wait_until(process, lambda steps=started_at + 1: has_done(steps))
        for builder in stopped:
            builder.resume()
        wait_until(process, (folder / file).exists)
        process.kill()
        process.communicate(timeout=60)
        if version == 1:  # the second refresh is sometimes done before the kill
            assert not (folder / "manifest.json").exists()
    damaged = run / "index/v000001/vectors-00002.npy"
    flip(damaged)
    assert re.search(rf"replug: {damaged} is damaged", wait_for(begin(run, *LOSSY_KEYS), status=2))
    flip(damaged)
    assert "resuming at step" in finish(run, *LOSSY_KEYS)
    assert what_must_be_equal(run) == what_must_be_equal(quiet)
    assert (run / "results.json").read_text() == (quiet / "results.json").read_text()
