"""The whole loop on stand-ins, driven as a user drives it: determinism, kill -9 and resume, failures."""

import contextlib
import json
import os
import signal
import time

import psutil
import pytest

from tests.support.command_line import STEPS, start, wait_for
from tests.support.runs import descendants, metrics, name_of, wait_for_step, what_must_be_equal


def test_a_run_ends_with_everything_a_user_is_promised(quiet_run):
    results = json.loads((quiet_run / "results.json").read_text())["language_modelling"]
    assert list(results) == ["none", "random", "replug", "lsr"]
    assert {"bpb", "bpb/even", "bpb/odd", "bpb - replug", "bpb - none"} <= results["lsr"].keys()
    assert results["lsr"]["bpb"]["n"] == 40
    for name in ("config.yaml", "environment.json", "report.html", "retriever/model.safetensors", "metrics.jsonl"):
        assert (quiet_run / name).is_file()
    assert [row["step"] for row in metrics(quiet_run)] == list(range(STEPS))


def test_batches_record_the_version_they_saw_and_refreshes_come_at_their_lag(quiet_run):
    rows = metrics(quiet_run)
    depth, versions = 2, [int(row["index/version"]) for row in rows]
    # Adopted at steps 9, 15 and 21; the batch of step s was retrieved at the boundary of step s - 2.
    expected = [sum(s - depth >= adopted for adopted in (9, 15, 21)) for s in range(STEPS)]
    assert versions == expected
    assert [int(row["pipeline/query_age_steps"]) for row in rows] == [0, 1] + [2] * (STEPS - 2)
    assert [row["step"] for row in rows if row["index/swapped"]] == [9, 15, 21]


def test_the_debug_run_learns(quiet_run):
    losses = [row["train/loss"] for row in metrics(quiet_run)]
    assert sum(losses[-6:]) < sum(losses[:6])


@pytest.mark.slow
def test_slowed_workers_change_no_number(quiet_run, tmp_path):
    """A sleeping LM on two replicas, and builders that are stopped and let go again all the time."""
    run = tmp_path / "slow"
    process = start(run, "lm.path=stand_in:0.01", "lm.num_replicas=2", "index.num_builders=2")
    while process.poll() is None:
        builders = [p for p in descendants(process.pid) if "Builder" in name_of(p)]
        for signal_number in (signal.SIGSTOP, signal.SIGCONT):
            for builder in builders:
                with contextlib.suppress(psutil.NoSuchProcess):
                    builder.send_signal(signal_number)
            time.sleep(0.2)
    wait_for(process)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


@pytest.mark.slow
def test_killed_in_a_refresh_the_same_command_goes_on_with_the_same_losses(quiet_run, finish, tmp_path):
    run = tmp_path / "run"
    process = start(run)
    wait_for_step(run, 7, process)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(process, status=-signal.SIGKILL)
    assert not (run / "results.json").exists(), "the run ended before it was killed"
    assert "resuming at step" in finish(run)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_the_same_command_goes_on_with_the_same_losses(quiet_run, begin, finish, tmp_path):
    """It comes to every process of the terminal: to those of Ray that did not leave its group as well."""
    run, only_by_signal = tmp_path / "run", "checkpoint.every_steps=100"
    process = begin(run, only_by_signal)
    wait_for_step(run, 7, process)
    os.killpg(process.pid, signal.SIGINT)
    output = wait_for(process, status=130)
    assert "replug: Ctrl-C: saving the step that is under way; again ends at once, without it" in output
    assert output.splitlines()[-1].startswith("replug: interrupted by Ctrl-C; the same command goes on")
    saved = len(metrics(run))
    assert f"saved step {saved}: the same command goes on from there" in output
    assert not (run / "results.json").exists(), "the run ended before it was interrupted"
    assert f"resuming at step {saved}" in finish(run, only_by_signal)
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
