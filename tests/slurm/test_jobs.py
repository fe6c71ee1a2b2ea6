"""Jobs on a real SLURM: their Ray clusters and GPUs, what stops them, and how a training comes back.

Most run a stand-in for `replug` that waits until it is told to stop, on the Ray cluster of the real script.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from replug.commands.slurm import gpus_of_nodes, render
from replug.slurm.ray_job import INTERRUPTED
from tests.slurm.local_slurm import LocalSlurm, SlurmMissing
from tests.support.runs import what_must_be_equal

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).parent.parent.parent
WAITING = f"""
import os, signal, sys, time
if os.environ.get("SLURM_RESTART_COUNT"):
    print("goes on and ends", flush=True)
    sys.exit(0)
import ray, shlex  # noqa: E402
quoted = dict(py_executable=shlex.quote(sys.executable))  # the product's is not in this stand-in
ray.init(address=sys.argv[-1].partition("=")[2], log_to_driver=False, runtime_env=quoted)
signals = []
for number in (signal.SIGTERM, signal.SIGUSR1):  # after Ray's own
    signal.signal(number, lambda number, _: signals.append(number))
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def where():
    time.sleep(0.5)
    return os.environ["SLURMD_NODENAME"]
print("nodes", *sorted(set(ray.get([where.remote() for _ in range(4)]))), flush=True)
print("ready at", sys.argv[-1], flush=True)
while not signals:
    time.sleep(0.1)
time.sleep(1)
print("actors answer", *sorted(set(ray.get([where.remote() for _ in range(4)]))), flush=True)
print("asked by", signal.Signals(signals[0]).name, flush=True)
os._exit({INTERRUPTED})
"""
NOT_LISTENING = """
import sys, time
print("ready at", sys.argv[-1], flush=True)
time.sleep(900)
"""
BROKEN = """
import os, sys
if os.environ["SLURMD_NODENAME"] == "n2":
    sys.exit("ModuleNotFoundError: No module named 'ray' on n2")
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[LocalSlurm]:
    """Two nodes on this machine, idle at first; or a loud reason why there are none (tests/conftest.py)."""
    if os.geteuid() != 0:
        pytest.skip("only root can start SLURM's daemons for these tests")
    try:
        started = LocalSlurm()
    except SlurmMissing as error:
        pytest.skip(f"NO SLURM HERE: {error}")
    with started:
        yield started


@dataclass(frozen=True)
class Job:
    """A submitted job and where it writes."""

    number: str
    folder: Path

    @property
    def log(self) -> str:
        path = self.folder / f"{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, text: str) -> None:
        wait_until(lambda: text in self.log, 200, lambda: f"no {text!r} in {self.log}")

    def files(self) -> list[Path]:
        """Return the files and folders of the job under /tmp."""
        return sorted(Path("/tmp").glob(f"replug-{self.number}-*"))


def submit(slurm: LocalSlurm, folder: Path, replug: str = WAITING, is_broken: bool = False) -> Job:
    """A two-node job of a stand-in for `replug`; Ray of a broken one cannot start on its second node."""
    package = folder / "code/replug"
    shutil.copytree(ROOT / "slurm", package / "slurm")
    (package / "commands").mkdir()
    for part in (package, package / "commands"):
        (part / "__init__.py").touch()
    (package / "commands/cli.py").write_text(replug)
    if is_broken:
        ray_node = package / "slurm/ray_node.py"
        impatient = ray_node.read_text().replace("JOIN_SECONDS = 120", "JOIN_SECONDS = 40")
        ray_node.write_text(BROKEN + impatient)
    script = render("train", {"nodes": "2", "cpus-per-task": "2"}, folder, folder, sys.executable)
    (folder / "job.sbatch").write_text(script)
    return Job(slurm.run("sbatch", "--parsable", str(folder / "job.sbatch")), folder)


def wait_until(is_so: Callable[[], bool], seconds: float, otherwise: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.1)


def processes_with(text: str) -> list[str]:
    """Command lines of other live processes that show a text in their arguments or their environment."""
    others = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            arguments = " ".join(process.cmdline())
            if process.pid != os.getpid() and text in f"{arguments} {process.environ()}":
                others.append(arguments)
    return others


NAMES = ("steps", "cancelled")


@pytest.fixture(scope="module")
def jobs(slurm: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Two jobs that wait, and one whose second node cannot start Ray, all on the same two nodes at once."""
    folder = tmp_path_factory.mktemp("jobs")
    submitted = {name: submit(slurm, folder / name, is_broken=name == "broken") for name in (*NAMES, "broken")}
    for name in NAMES:
        submitted[name].wait_for_line("ready at")
    yield submitted
    for job in submitted.values():
        slurm.run("scancel", job.number, check=False)


def test_jobs_at_once_on_the_same_machines_do_not_meet_and_show_their_tokens_nowhere(jobs):
    addresses, tokens = set(), set()
    for job in (jobs[name] for name in NAMES):
        addresses.add(re.search(r"ready at ray.address=(\S+)", job.log).group(1))
        assert "nodes n1 n2\n" in job.log  # its tasks ran on both
        assert "with 2 nodes of 2 CPUs" in job.log  # its own two, of the four that there are
        (folder,) = job.files()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        file = folder / "token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        tokens.add(token := file.read_text())
        assert len(token) == 64 and token not in job.log
        assert not processes_with(token)
        logs = [path for path in folder.rglob("*") if path.is_file() and path != file]
        assert logs and not [path for path in logs if token.encode() in path.read_bytes()]
    assert len(addresses) == len(tokens) == 2


def test_a_worker_that_cannot_start_fails_the_job_with_its_log(slurm, jobs):
    assert slurm.wait_for(jobs["broken"].number, "FAILED") == "FAILED"
    assert slurm.field(jobs["broken"].number, "ExitCode") == "1:0"
    log = jobs["broken"].log
    assert "Ray on node n2 has ended with status 1" in log and "not all nodes joined" in log
    assert "No module named 'ray' on n2" in log
    assert "ready at" not in log
    assert not jobs["broken"].files()


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


# GPUs ---------------------------------------------------------------------------------------------------------

# As `slurm.ray_job` starts them: Ray on both nodes, which goes on, and `replug` beside it on the first.
STEPS = """
import os, subprocess
from pathlib import Path
from replug.slurm.ray_job import JobAllocation, job_environment
allocation = JobAllocation.from_environment(os.environ)
environment = job_environment(os.environ, Path("/tmp/none"))
shown = "import os, time; names = 'SLURMD_NODENAME', 'SLURM_GPUS_ON_NODE', 'CUDA_VISIBLE_DEVICES'; "
shown += "line = [os.environ[name] for name in names]; "
shown += "os.write(1, (' '.join(line) + chr(10)).encode()); "
nodes = [*allocation.nodes, allocation.nodes[0]]
steps = [
    subprocess.Popen(allocation.step(node, "-c", shown + f"time.sleep({seconds})"), env=environment)
    for node, seconds in zip(nodes, (4, 4, 0))
]
print("statuses", *(step.wait(150) for step in steps), flush=True)
"""


@pytest.mark.parametrize("option", ["--gpus-per-node=a100:2", pytest.param("--gres=gpu", marks=pytest.mark.nightly)])
def test_all_steps_on_a_node_see_the_gpus_that_were_counted_in_one_order(slurm, tmp_path, option):
    script = tmp_path / "job.sh"
    (tmp_path / "steps.py").write_text(STEPS)
    script.write_text(f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n{sys.executable} {tmp_path / 'steps.py'}\n")
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", option, f"--output={tmp_path / 'log'}")
    job = slurm.run("sbatch", "--parsable", *options, str(script))
    slurm.wait_for(job, "COMPLETED")
    name, _, value = option.removeprefix("--").partition("=")
    count = gpus_of_nodes({name: value})[0]
    seen = f"{count} {','.join(map(str, range(count)))}"
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == sorted([f"n1 {seen}", f"n1 {seen}", f"n2 {seen}", "statuses 0 0 0"])


# `replug slurm --submit`: the whole loop over two nodes, quiet and interrupted, of the code that was frozen -----------

REPLUG = [sys.executable, "-m", "replug.commands.cli"]
OPTIONS = ["--nodes=2", "--cpus-per-task=4", "--submit", "--sbatch=--hold"]
KEYS = ["train.max_steps=16", "refresh.every_steps=6", "refresh.lag_steps=3", "checkpoint.every_steps=4"]


def submit_training(slurm: LocalSlurm, checkout: Path) -> Job:
    """Submit a held job as a user does in the folder of the code, then edit all of it while the job waits."""
    shutil.copytree(ROOT / "replug", checkout / "replug", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "configs/debug.yaml", checkout / "mine.yaml")
    command = [*REPLUG, "slurm", "mine.yaml", *OPTIONS, "run_dir=run", *KEYS]
    environment = {**slurm.environment, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (checkout / "mine.yaml").write_text("run_dir: runs/elsewhere\nno_such_key: 1\n")
    for module in ("train/run.py", "commands/cli.py", "models/local/stand_in_lm.py", "index_workers/searcher.py"):
        (checkout / "replug" / module).write_text("raise SystemExit('an edit after the submission was run')\n")
    (folder,) = (checkout / "run/submitted").iterdir()
    return Job(done.stdout.partition("submitted as job ")[2].partition(";")[0], folder)


def test_a_requeued_run_ends_with_the_losses_of_a_quiet_one_by_the_code_that_was_frozen(slurm, tmp_path):
    job, quiet, run = submit_training(slurm, tmp_path), tmp_path / "quiet", tmp_path / "run"
    slurm.run("scontrol", "release", job.number)
    log = run / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 7, 300, lambda: job.log)
    slurm.run("scancel", "--signal=USR1", job.number)
    slurm.wait_for(job.number, "PENDING", seconds=120)
    slurm.start_again(job.number)
    # The same on a Ray of its own, begun in a folder without our packages.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    clean |= {"PYTHONPATH": str(job.folder / "code"), "PYTHONSAFEPATH": "1"}
    alone = subprocess.run(
        [*REPLUG, "train", "config.yaml", f"run_dir={quiet}"],
        cwd=job.folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert slurm.wait_for(job.number, "COMPLETED", "FAILED", "TIMEOUT", seconds=300) == "COMPLETED", job.log
    assert slurm.field(job.number, "Restarts") == "1"
    assert "resuming at step" in job.log and job.log.count("with 2 nodes of 4 CPUs") == 2
    assert not job.files()
    assert what_must_be_equal(run) == what_must_be_equal(quiet) and len(what_must_be_equal(run)) == 16
    assert (run / "results.json").read_bytes() == (quiet / "results.json").read_bytes()
    assert (job.folder / "version.json").is_file()
