"""Two-node jobs on a real SLURM: their Ray clusters, what stops them, and how they come back."""

import re
import stat

import pytest

from tests.slurm.slurm_jobs import NOT_LISTENING, processes_with, submit, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.alone]

BROKEN = """
import os, sys
if os.environ["SLURMD_NODENAME"] == "n2":
    sys.exit("ModuleNotFoundError: No module named 'ray' on n2")
"""


@pytest.fixture(scope="module")
def jobs(slurm, tmp_path_factory):
    """Three jobs that wait, and one whose second node cannot start Ray, all on the same two nodes at once."""
    folder = tmp_path_factory.mktemp("jobs")
    submitted = {
        name: submit(slurm, folder / name, on_nodes=BROKEN if name == "broken" else "")
        for name in ("steps", "batch", "cancelled", "broken")
    }
    for name in ("steps", "batch", "cancelled"):
        submitted[name].wait_for_line("ready at")
    yield submitted
    for job in submitted.values():
        slurm.run("scancel", job.number, check=False)


def test_a_worker_that_cannot_start_fails_the_job_with_its_log(slurm, jobs):
    assert slurm.wait_for(jobs["broken"].number, "FAILED") == "FAILED"
    assert slurm.field(jobs["broken"].number, "ExitCode") == "1:0"
    log = jobs["broken"].log
    assert "Ray on node n2 has ended with status 1" in log and "not all nodes joined" in log
    assert "No module named 'ray' on n2" in log
    assert "ready at" not in log
    assert not jobs["broken"].files()


def test_jobs_at_once_on_the_same_machines_do_not_meet(jobs):
    waiting = [jobs[name] for name in ("steps", "batch", "cancelled")]
    addresses = [re.search(r"ready at ray.address=(\S+)", job.log).group(1) for job in waiting]
    assert len(set(addresses)) == 3
    for job in waiting:
        assert "nodes n1 n2\n" in job.log  # its tasks ran on both
        assert "with 2 nodes of 2 CPUs" in job.log  # its own two, of the six that there are


def test_the_token_is_this_users_alone_and_shown_nowhere(jobs):
    tokens = set()
    for name in ("steps", "batch", "cancelled"):
        (folder,) = jobs[name].files()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        file = folder / "token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        token = file.read_text()
        assert len(token) == 64 and token not in jobs[name].log
        assert not processes_with(token)
        logs = [path for path in folder.rglob("*") if path.is_file() and path != file]
        assert logs and not [path for path in logs if token.encode() in path.read_bytes()]
        tokens.add(token)
    assert len(tokens) == 3


def test_a_signal_to_the_steps_puts_the_job_back_and_it_goes_on(slurm, jobs):
    job = jobs["steps"]
    slurm.run("scancel", "--signal=USR1", job.number)
    slurm.wait_for(job.number, "PENDING", seconds=120)
    assert slurm.field(job.number, "Restarts") == "1"
    assert "asked by SIGUSR1" in job.log and "actors answer n1 n2" in job.log  # Ray outlived the signal
    slurm.start_again(job.number)
    slurm.wait_for(job.number, "COMPLETED", seconds=200)
    assert "goes on and ends" in job.log
    assert not job.files()


def test_a_cancelled_job_ends_and_leaves_nothing_behind(slurm, jobs):
    job = jobs["cancelled"]
    (folder,) = job.files()
    slurm.run("scancel", job.number)
    slurm.wait_for(job.number, "CANCELLED", seconds=120)
    assert slurm.field(job.number, "Restarts") == "0"
    wait_until(lambda: not job.files(), 100, lambda: f"{job.files()} is still there")
    wait_until(lambda: not processes_with(str(folder)), 100, lambda: f"{processes_with(str(folder))} still run")


def test_pre_emption_with_grace_lets_replug_save_and_requeues_once(slurm, tmp_path):
    for number in slurm.run("squeue", "--noheader", "--format=%i").split():
        slurm.run("scancel", number)
    listening = submit(slurm, tmp_path / "listening")
    early = submit(slurm, tmp_path / "early", replug=NOT_LISTENING)  # such as while it still imports
    for job in (listening, early):
        job.wait_for_line("ready at")
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    slurm.wait_for(slurm.run("sbatch", "--parsable", *urgent), "COMPLETED", seconds=200)
    for job in (listening, early):
        slurm.wait_for(job.number, "PENDING", seconds=60)
        assert slurm.field(job.number, "Restarts") == "1"
        slurm.run("scancel", job.number)
    assert "asked by SIGTERM" in listening.log and "actors answer n1 n2" in listening.log
