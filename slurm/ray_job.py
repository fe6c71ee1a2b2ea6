"""Run one SLURM job: Ray on its nodes, one `replug` command, and a requeue after an interruption.

    python -m replug.slurm.ray_job train CONFIG [KEY=VALUE ...]        run by slurm/job.sbatch

This process runs on the first node. Ray of each node is one step (`slurm.ray_node`) and `replug` is another, so that
`scancel --signal=USR1 JOB`, which reaches steps only, reaches `replug`; signals to the job script are passed on.
`replug` then saves its step and exits with 75. The token goes to the nodes through the standard input of their steps.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from replug.slurm.ray_node import JOIN_SECONDS, NOT_JOINED, write_token

INTERRUPTED = 75  # replug's exit status: it saved its step, and the same command resumes
RAYS_OWN_STATUS = 1  # of a process that Ray ends because its raylet is gone
MOST_RESTARTS = 10  # then a job with a killed Ray is not requeued: it has too little memory
SECONDS_TO_SEE = 10  # for Ray's step to end behind its raylet
STOP_SECONDS = 30
LOOK_SECONDS = 0.2
TAIL_LINES = 30
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # above Ray's usual ports, below the kernel's ephemeral ports
# Variables that name another cluster, or keep Ray to loopback.
FOREIGN = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_TMPDIR", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
# Requests of the whole job. srun would repeat them for each step, of one node and one task: all GPUs of
# the job on one node, or fewer than the node has. Without them every step sees all of the job's GPUs on its node.
OF_THE_JOB = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK"),
)


@dataclass(frozen=True, slots=True)
class JobAllocation:
    """The nodes and CPUs that SLURM gave to this job, the first node first."""

    job_id: int
    nodes: tuple[str, ...]
    cpus_per_node: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "JobAllocation":
        names = output("scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
        cpus = environment.get("SLURM_CPUS_PER_TASK") or environment["SLURM_CPUS_ON_NODE"]
        return cls(int(environment["SLURM_JOB_ID"]), tuple(names), cpus)

    def step(self, node: str, *command: str) -> list[str]:
        """Return the srun command of a step on one node, beside the job's other steps there."""
        where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--cpus-per-task={self.cpus_per_node}"]
        return ["srun", "--overlap", "--unbuffered", *where, sys.executable, *command]


@dataclass(frozen=True, slots=True)
class JobNode:
    """Ray on one node: its SLURM step and its log."""

    name: str
    step: subprocess.Popen
    log: Path

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class StopRequest:
    """The last signal that asked this job to stop, passed on to the step of `replug`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.step: subprocess.Popen | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _: FrameType | None) -> None:
        self.number = number
        if self.step is not None:
            self.step.send_signal(signal.SIGUSR1)  # srun would turn SIGTERM into a kill


def main() -> int:
    """Return the exit status of the `replug` command; 75 requeues the job."""
    if "SLURM_JOB_NODELIST" not in os.environ:
        sys.exit(
            "replug job: this process is not in a SLURM job; submit slurm/job.sbatch with sbatch, or use `replug slurm`"
        )
    request = StopRequest()
    for name in FOREIGN:
        os.environ.pop(name, None)
    allocation = JobAllocation.from_environment(os.environ)
    if "SLURM_GPUS" in os.environ and len(allocation.nodes) > 1:  # no step of one node would start
        sys.exit("replug job: --gpus counts all nodes together; submit with --gpus-per-node or --gres=gpu:COUNT")
    say(f"job {allocation.job_id} on {' '.join(allocation.nodes)}")
    # Short, and not $TMPDIR: the sockets in it have at most 107 characters, and all nodes take the same path.
    folder = Path(tempfile.mkdtemp(prefix=f"replug-{allocation.job_id}-", dir="/tmp"))
    nodes: list[JobNode] = []
    try:
        status = run(allocation, folder, nodes, request)
    finally:
        stop(nodes)
        shutil.rmtree(folder, ignore_errors=True)
    interrupted = status == INTERRUPTED or (status != 0 and is_preempted(allocation.job_id))
    return requeue(allocation.job_id) if interrupted else status


def run(allocation: JobAllocation, folder: Path, nodes: list[JobNode], request: StopRequest) -> int:
    """Start Ray, appending its nodes to `nodes`, and then `replug`. Returns `replug`'s exit status."""
    import ray.util

    host, port = ray.util.get_node_ip_address(), free_port(allocation.job_id)  # as other nodes reach this one
    environment = job_environment(os.environ, folder)
    token, address = secrets.token_hex(32), f"{host}:{port}"
    write_token(folder, token)
    for name in allocation.nodes:
        nodes.append(start_node(allocation, name, folder, address, token, environment))
    say(f"Ray starts at {address} with {len(nodes)} nodes of {allocation.cpus_per_node} CPUs")
    once_joined = ("-m", "replug.slurm.ray_node", "--run", address, str(len(nodes)))
    command = allocation.step(allocation.nodes[0], *once_joined, *sys.argv[1:])
    return run_replug(command, nodes, environment, request)


def job_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of every step: the token's path, never the token, and GPUs in SLURM's order."""
    kept = {name: value for name, value in environment.items() if name not in OF_THE_JOB}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    gpus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # as SLURM numbers them
    return {**kept, **token, **gpus}


def free_port(job_id: int) -> int:
    """Return the first of two neighbouring free ports; other jobs on this machine start elsewhere."""
    ports = (FIRST_PORT + (job_id * 20 + attempt * 2) % NUM_PORTS for attempt in range(50))
    return next(port for port in ports if is_free(port) and is_free(port + 1))


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def start_node(
    allocation: JobAllocation, name: str, folder: Path, address: str, token: str, environment: dict[str, str]
) -> JobNode:
    """Start Ray's step on one node, in a new session, so that signals to the job do not abort srun."""
    head = ["--head"] if name == allocation.nodes[0] else []
    command = allocation.step(name, "-m", "replug.slurm.ray_node", str(folder), address, *head)
    log = folder / f"{name}.log"
    with log.open("w") as output_file:
        step = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
    assert step.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once, which `run_replug` reports
        step.stdin.write(f"{token}\n")
        step.stdin.flush()
    return JobNode(name, step, log)


def run_replug(command: list[str], nodes: list[JobNode], environment: dict[str, str], request: StopRequest) -> int:
    """Run `replug` and return its exit status; report nodes that are lost on the way."""
    lost: set[str] = set()
    request.step = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    if request.number is not None:  # while it was being started
        request.step.send_signal(signal.SIGUSR1)
    while (status := request.step.poll()) is None:
        for node in nodes:
            if node.step.poll() is not None and node.name not in lost:
                lost.add(node.name)
                say(f"Ray on node {node.name} has ended with status {node.step.returncode}\n{node.tail()}")
        time.sleep(LOOK_SECONDS)
    if status == NOT_JOINED:
        tails = "\n".join(f"--- the end of {node.name}'s log\n{node.tail()}" for node in nodes)
        say(f"not all nodes joined Ray within {JOIN_SECONDS} s\n{tails}")
        return 1
    if status == 128 + signal.SIGUSR1:
        return INTERRUPTED  # ended by the signal before it listened; its results are on disk
    if status == RAYS_OWN_STATUS and int(os.environ.get("SLURM_RESTART_COUNT", "0")) < MOST_RESTARTS:
        with contextlib.suppress(subprocess.TimeoutExpired):  # Ray's step ends behind its raylet
            nodes[0].step.wait(SECONDS_TO_SEE)
            say("Ray was killed on this node, as the system does when memory is short")
            return INTERRUPTED
    return status if status >= 0 else 128 - status


def stop(nodes: list[JobNode]) -> None:
    """End this job's Ray by closing the standard input of its steps."""
    for node in nodes:
        assert node.step.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            node.step.stdin.close()
    end = time.monotonic() + STOP_SECONDS
    for node in nodes:
        try:
            node.step.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.step.kill()


def is_preempted(job_id: int) -> bool:
    """Return whether SLURM has begun the grace time of a pre-emption."""
    match = re.search(r"PreemptTime=(\S+)", output("scontrol", "show", "job", "--oneliner", str(job_id)))
    return match is not None and match.group(1)[0].isdigit()


def requeue(job_id: int) -> int:
    """Requeue the job, unless SLURM is already ending or requeueing it."""
    state = output("squeue", "--noheader", f"--jobs={job_id}", "--format=%T")
    if state != "RUNNING":
        say(f"interrupted; SLURM has this job as {state}, so SLURM decides")
        return INTERRUPTED
    say("interrupted; back into the queue, to resume with the same command")
    if subprocess.run(["scontrol", "requeue", str(job_id)], check=False).returncode != 0:
        say("SLURM does not requeue it; submit it again to resume")
        return INTERRUPTED
    return 0


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def say(message: str) -> None:
    print(f"replug job: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
