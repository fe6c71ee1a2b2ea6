"""Run Ray on one node of a job.

    python -m replug.slurm.ray_node FOLDER HOST:PORT [--head]        reads the token from standard input
    python -m replug.slurm.ray_node --run HOST:PORT NODES ARGUMENT…  runs `replug` once that many nodes have joined

Ray ends when standard input ends, which `slurm.ray_job` holds open. It ignores SIGTERM and SIGUSR1, which pre-emption
and `scancel` send to every process at once, because `replug` still needs its actors to save its step.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

OBJECT_STORE_BYTES = 2**30  # ids, queries and answers pass through it, vectors and weights do not
LOOK_SECONDS = 0.3
JOIN_SECONDS = 120
NOT_JOINED = 69  # EX_UNAVAILABLE
SHIELDED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}


def main() -> int:
    """Return the exit status of `ray start`, or 0 if its input ended first."""
    if sys.argv[1] == "--run":
        return run_on_nodes(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    folder, address, *rest = sys.argv[1:]
    is_first_here = not Path(folder).exists()  # else another process of the job made it, and removes it
    write_token(Path(folder), sys.stdin.readline().strip())
    command = ray_command(folder, address, "--head" in rest)
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)  # inherited by all Ray processes; blocks any handler
    ray, is_told = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0), threading.Event()
    threading.Thread(target=stop_at_end_of_input, args=(ray, is_told), daemon=True).start()
    status = ray.wait()
    if is_first_here:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_told.is_set() else status or 1


def write_token(folder: Path, token: str) -> None:
    """Write the token into a folder that only this user can read; two nodes may be one machine."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o777 != 0o700 or folder.is_symlink():
        sys.exit(f"{folder} is not a folder of this user's alone")
    if not (folder / "token").exists():
        partial = folder / f"token.{os.getpid()}"
        partial.touch(mode=0o600)
        partial.write_text(token)
        partial.rename(folder / "token")


def ray_command(folder: str, address: str, is_head: bool) -> list[str]:
    """Return the `ray start` command, with SLURM's CPUs and GPUs on this node. Port 0 means any free port."""
    host, _, port = address.rpartition(":")
    cpus = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ["SLURM_CPUS_ON_NODE"]
    options = {
        "num-cpus": cpus,
        "num-gpus": os.environ.get("SLURM_GPUS_ON_NODE") or "0",  # Ray compares it with CUDA_VISIBLE_DEVICES
        "object-store-memory": str(OBJECT_STORE_BYTES),
        "temp-dir": f"{folder}/ray",  # not the folder itself, which Ray opens to everybody
        "min-worker-port": "0",
        "max-worker-port": "0",
        "dashboard-agent-listen-port": "0",
    }
    if is_head:
        options |= {"node-ip-address": host, "port": port, "ray-client-server-port": str(int(port) + 1)}
        options |= {"include-dashboard": "false"}
    else:
        options |= {"address": address}
    chosen = [f"--{name}={value}" for name, value in options.items()]
    ray = Path(sys.executable).with_name("ray")  # of this environment, not from PATH
    head = ["--head"] if is_head else []
    return [str(ray), "start", "--block", "--disable-usage-stats", "--log-color=false", *head, *chosen]


def stop_at_end_of_input(ray: subprocess.Popen, is_told: threading.Event) -> None:
    """Kill `ray start` and its group; Ray's other processes end with their raylet."""
    sys.stdin.read()
    is_told.set()
    os.killpg(ray.pid, signal.SIGKILL)


def run_on_nodes(address: str, wanted: int, arguments: list[str]) -> int:
    """Replace this process by `replug` once `wanted` nodes have joined; return NOT_JOINED after JOIN_SECONDS.

    Ask the port first: Ray itself tries for minutes where nothing listens yet.
    """
    import ray  # only here: starting Ray on a node does not need it

    host, _, port = address.rpartition(":")
    end = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError):
            if not ray.is_initialized():
                socket.create_connection((host, int(port)), timeout=5).close()
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            if sum(node["Alive"] for node in ray.nodes()) == wanted:
                ray.shutdown()
                replug = [sys.executable, "-m", "replug.commands.cli", *arguments, f"ray.address={address}"]
                os.execv(sys.executable, replug)
    return NOT_JOINED


if __name__ == "__main__":
    sys.exit(main())
