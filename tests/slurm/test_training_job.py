"""`replug slurm --submit` on a real SLURM: the whole loop over two nodes, quiet and interrupted, of what was frozen."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.local_slurm import LocalSlurm
from tests.slurm.slurm_jobs import Job
from tests.support.runs import metrics

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).parent.parent.parent
STEPS = 16
REPLUG = [sys.executable, "-m", "replug.commands.cli"]
OPTIONS = ["--nodes=2", "--cpus-per-task=4", "--submit", "--sbatch=--hold"]
OVERRIDES = [
    *(f"train.max_steps={STEPS}", "refresh.every_steps=6", "refresh.lag_steps=3", "checkpoint.every_steps=4"),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The code and a configuration of a user's own, whose run directories and stand-in names are relative."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "replug", folder / "replug", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "configs/debug.yaml", folder / "mine.yaml")
    return folder


def submit(slurm: LocalSlurm, checkout: Path, run: str) -> Job:
    """As a user does it, in the folder of the code; the job is held until it is released."""
    command = [*REPLUG, "slurm", "mine.yaml", *OPTIONS, f"run_dir={run}", *OVERRIDES]
    environment = {**slurm.environment, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (checkout / run / "submitted").iterdir()
    return Job(done.stdout.partition("submitted as job ")[2].partition(";")[0], folder)


def edit_everything(checkout: Path) -> None:
    """What a user does while the jobs wait: change the configuration, break the code, of driver and actors both."""
    (checkout / "mine.yaml").write_text("run_dir: runs/elsewhere\nno_such_key: 1\n")
    for module in ("train/run.py", "commands/cli.py", "models/local/stand_in_lm.py", "index_workers/searcher.py"):
        (checkout / "replug" / module).write_text("raise SystemExit('an edit after the submission was run')\n")


@pytest.fixture(scope="module")
def runs(slurm, checkout) -> tuple[Path, Path, Job]:
    """Two runs of one configuration at once: one quiet, without SLURM; one of two nodes, interrupted and requeued."""
    job = submit(slurm, checkout, "runs/interrupted")
    edit_everything(checkout)
    slurm.run("scontrol", "release", job.number)
    with quiet_run(job, checkout / "runs/quiet") as quiet:
        wait_for_step(checkout / "runs/interrupted", 7, job)
        slurm.run("scancel", "--signal=USR1", job.number)
        slurm.wait_for(job.number, "PENDING", seconds=120)
        slurm.start_again(job.number)
        state = slurm.wait_for(job.number, "COMPLETED", "FAILED", "TIMEOUT", seconds=300)
        assert state == "COMPLETED", job.log
        output, _ = quiet.communicate(timeout=300)
        assert quiet.returncode == 0, output
    return checkout / "runs/quiet", checkout / "runs/interrupted", job


@contextmanager
def quiet_run(job: Job, run: Path) -> Iterator[subprocess.Popen]:
    """`replug train` of what the job froze, on a Ray of its own, begun in a folder without our packages."""
    command = [*REPLUG, "train", "config.yaml", f"run_dir={run}"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        command,
        cwd=job.folder,
        env={**clean, "PYTHONPATH": str(job.folder / "code"), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()


def wait_for_step(run: Path, step: int, job: Job, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) <= step:
        assert time.monotonic() < end, job.log
        time.sleep(0.05)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in metrics(run) if "train/loss" in row]


def test_a_requeued_run_ends_with_the_losses_of_a_quiet_one_by_the_code_that_was_frozen(slurm, runs):
    quiet, interrupted, job = runs
    assert slurm.field(job.number, "Restarts") == "1"
    assert "resuming at step" in job.log and job.log.count("with 2 nodes of 4 CPUs") == 2
    assert not job.files()
    assert [step for step, _ in losses(quiet)] == list(range(STEPS))
    assert losses(interrupted) == losses(quiet)
    assert (interrupted / "results.json").read_bytes() == (quiet / "results.json").read_bytes()
    assert (job.folder / "version.json").is_file()
