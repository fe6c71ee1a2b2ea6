"""Jobs whose `replug` is a stand-in that waits until it is told to stop, on the real Ray cluster of the real script."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from replug.commands.slurm import render
from replug.slurm.ray_job import INTERRUPTED
from tests.slurm.local_slurm import LocalSlurm

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


@dataclass(frozen=True)
class Job:
    """A submitted job and where it writes."""

    number: str
    folder: Path

    @property
    def log(self) -> str:
        path = self.folder / f"{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, text: str, seconds: float = 200) -> None:
        wait_until(lambda: text in self.log, seconds, lambda: f"no {text!r} in {self.log}")

    def files(self) -> list[Path]:
        """What the job has of its own under /tmp."""
        return sorted(Path("/tmp").glob(f"replug-{self.number}-*"))


def submit(slurm: LocalSlurm, folder: Path, replug: str = WAITING, on_nodes: str = "") -> Job:
    """A two-node job of a stand-in for `replug`; `on_nodes` is put before what runs Ray on each node."""
    package = folder / "code/replug"
    shutil.copytree(ROOT / "slurm", package / "slurm")
    (package / "commands").mkdir()
    for part in (package, package / "commands"):
        (part / "__init__.py").touch()
    (package / "commands/cli.py").write_text(replug)
    ray_node = package / "slurm/ray_node.py"
    ray_node.write_text(f"{on_nodes}\n{ray_node.read_text()}")
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
