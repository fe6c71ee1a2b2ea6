"""`replug label` killed and run again, and a training on what it made killed and run again, as real processes."""

import re
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.data.labels import GIVERS, Labels
from tests.support.command_line import ROOT, start_process, wait_for
from tests.support.runs import wait_for_step, what_must_be_equal

pytestmark = pytest.mark.slow

SET = ("data.num_queries=60", "data.num_dev=12", "data.num_heldout=10")
LABEL = (*SET, "label.dense=4", "label.bm25=2", "label.random=1", "index.threads_per_worker=1")
TRAIN = (*SET, "train.epochs=2", "train.batch_size=8", "train.threads=1", "evaluate.heldout=false")


def num_scored(cache: Path) -> int:
    """Pairs in the cache of scores; 0 where there is none yet."""
    if not cache.is_file():
        return 0
    with sqlite3.connect(f"file:{cache}?mode=ro", uri=True) as file:
        try:
            return int(file.execute("SELECT COUNT(*) FROM scores").fetchone()[0])
        except sqlite3.OperationalError:  # its tables are not there yet
            return 0


def until(holds: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_and_run_again_no_pair_is_scored_twice_and_a_training_on_the_labels_resumes_exactly(tmp_path):
    config, out = ROOT / "configs/debug.yaml", tmp_path / "labels"
    run, twin = tmp_path / "run", tmp_path / "twin"
    label = ("label", config, "--out", out, f"run_dir={run}", f"data.out={tmp_path}/set", *LABEL)
    slow = start_process(*label, "lm.path=stand_in:0.3")
    until(lambda: num_scored(out / "scores.sqlite") > 0, slow)
    slow.kill()
    slow.communicate()
    before = num_scored(out / "scores.sqlite")
    printed = wait_for(start_process(*label, "lm.path=stand_in:0.3"))
    scored, hits = map(int, re.search(r"(\d+) pairs were scored (\d+) were found", printed.replace(",", "")).groups())
    assert 0 < before == hits and scored == num_scored(out / "scores.sqlite") - before
    labels = Labels(out)
    assert labels.counts == {"queries": 60, "dev": 12} and scored + hits == 72 * 8
    assert {giver for row in labels.rows("queries") for giver in row["given_by"]} == set(GIVERS) - {"tuned"}

    train = ("train", config, f"data.prepared={tmp_path}/set", "data.source=null", f"train.labels={out}", *TRAIN)
    lasting = ("lm.path=stand_in:0.3", "checkpoint.every_steps=3")
    killed = start_process(*train, *lasting, f"run_dir={run}")
    wait_for_step(run, 6, killed)
    killed.kill()
    killed.communicate()
    wait_for(start_process(*train, *lasting, f"run_dir={run}"))
    wait_for(start_process(*train, *lasting, f"run_dir={twin}"))
    assert len(what_must_be_equal(run)) == 15
    assert what_must_be_equal(run) == what_must_be_equal(twin)
