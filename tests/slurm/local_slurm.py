"""A real SLURM on this machine, of two nodes, in a folder of its own: controller, daemons, munge and its key.

`LocalSlurm` starts it for the tests and ends it.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
START_SECONDS, END_SECONDS, SETTLE_SECONDS = 100, 30, 3
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONF = """\
ClusterName=replug
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
FirstJobId={first_job}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=65536 Gres=gpu:a100:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=65536 Gres=gpu:a100:2
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 PriorityTier=10
"""


# Files that are there on every machine stand for the devices: SLURM hands them out and never opens them.
GRES = """\
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/null
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/zero
"""


class SlurmMissing(Exception):
    """Why there can be no SLURM here."""


class LocalSlurm:
    """Two nodes, n1 and n2, of eight CPUs each and two GPUs that are none.

    Partition `urgent` pre-empts `low`, which gives 60 s of grace.
    """

    def __init__(self) -> None:
        missing = [name for name in PROGRAMS if program(name) is None]
        if missing:
            raise SlurmMissing(f"{', '.join(missing)} not installed: {INSTALL}")
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._daemons: list[subprocess.Popen] = []
        conf = self.folder / "slurm.conf"
        first_job = secrets.randbelow(10**6) + 1  # what another SLURM's jobs left under /tmp is none of these
        names = {"host": socket.gethostname(), "user": getpass.getuser(), "first_job": first_job}
        conf.write_text(CONF.format(**names, ports=free_ports(3), folder=self.folder))
        (self.folder / "gres.conf").write_text(GRES)
        (self.folder / "state").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, check: bool = True, timeout: float = 100, **options: object) -> str:
        """Standard output of a client command, such as squeue."""
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=timeout, **options)  # type: ignore[call-overload]
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return str(done.stdout).strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for(self, job: str, *states: str, seconds: float = 200) -> str:
        """The state, once it is one of these. Another end, or none in this time, fails the test with SLURM's logs."""
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            is_over = state in ENDS or time.monotonic() > end
            assert not is_over, f"job {job} is {state}, expected {states}: {self._said(lines=20)}"
            time.sleep(0.2)
        return state

    def start_again(self, job: str, seconds: float = 100) -> None:
        """Start a requeued job now. Its first start must be over on the nodes too, or its end would be the second's."""
        end = time.monotonic() + seconds
        while any(f"[{job}." in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])):
            assert time.monotonic() < end, f"steps of job {job} still run {seconds:g} s after it was requeued"
            time.sleep(0.2)
        time.sleep(SETTLE_SECONDS)
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def close(self) -> None:
        """End every job and every daemon, and remove the folder."""
        end = time.monotonic() + END_SECONDS
        while self._daemons and time.monotonic() < end and self.run("squeue", "--noheader", check=False):
            self.run("scancel", f"--user={getpass.getuser()}", check=False)
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(30)
        for process in psutil.process_iter():  # of this SLURM's daemons, steps and jobs
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.folder / "slurm.conf"):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.folder.chmod(0o755)  # munge clients of other users could not reach the socket, but munged asks for it
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{ending}" for name, ending in files.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._until("munged", lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self._until("slurmd", lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%D %t", check=False) == "2 idle")

    def _daemon(self, name: str, *arguments: str) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        command = [str(program(name)), *arguments]
        self._daemons.append(
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        )

    def _until(self, what: str, is_ready) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + START_SECONDS
        while not is_ready():
            if time.monotonic() > end:
                raise SlurmMissing(f"{what} did not start within {START_SECONDS} s: {self._said()}")
            time.sleep(0.1)

    def _said(self, lines: int = 3) -> str:
        """The last lines of every log."""
        logs = [path for path in sorted(self.folder.iterdir()) if path.suffix in (".log", ".out")]
        return "; ".join(f"{path.name}: {' / '.join(path.read_text().splitlines()[-lines:])}" for path in logs)


def program(name: str) -> str | None:
    """Where a command is; daemons lie in sbin, which a user's PATH may leave out."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports
