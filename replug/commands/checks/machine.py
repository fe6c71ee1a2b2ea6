"""Check what a run needs of this machine.

A check returns a `Check`, or None if it has nothing to say. Checks start no Ray, load no model and download nothing,
and each ends within `LIMIT_SECONDS`, even if a file system hangs.
"""

import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from replug.slurm.ray_node import OBJECT_STORE_BYTES

LIMIT_SECONDS = 30.0
GIB = 2**30


class State(Enum):
    ok = "ok"
    warning = "warning"
    wrong = "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its state, a line that says it, and how to fix it."""

    name: str
    state: State
    found: str
    fix: str = ""


Checks = Sequence[tuple[str, Callable[[], Check | None]]]


def run_checks(checks: Checks, limit_seconds: float = LIMIT_SECONDS) -> list[Check]:
    """Run every check within its time limit and return the findings in order."""
    results = [_limited(name, check, limit_seconds) for name, check in checks]
    return [check for check in results if check is not None]


def _limited(name: str, check: Callable[[], Check | None], limit_seconds: float) -> Check | None:
    results: list[Check | None] = []

    def caught() -> None:
        try:
            results.append(check())
        except (OSError, ValueError, ImportError) as error:
            said = f"cannot be looked at: {type(error).__name__}: {error}"
            results.append(Check(name, State.wrong, said, "fix what it names"))

    # A daemon: a thread that hangs in a dead file system must not keep the command from ending.
    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    late = Check(name, State.warning, f"no answer within {limit_seconds:g} s", "is a file system or the network stuck?")
    return results[0] if results else late


def machine_checks() -> Checks:
    """Return the checks that do not depend on a configuration."""
    return [
        ("CUDA", cuda),
        ("Ray token", ray_token),
        ("Ray here", running_ray),
        ("shared memory", shared_memory),
    ]


def cuda() -> Check:
    """Check that torch can use the machine's GPUs."""
    import torch

    from replug.models.hardware import unusable_gpus

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Check("CUDA", State.ok, f"{torch.version.cuda}, {len(names)} GPUs: {', '.join(sorted(set(names)))}")
    if problem := unusable_gpus():
        return Check("CUDA", State.wrong, problem, "or hide the GPUs, to run on the CPU: CUDA_VISIBLE_DEVICES=")
    return Check("CUDA", State.ok, "no GPU for this process: everything runs on the CPU")


def ray_token() -> Check:
    """Check how Ray authenticates; the token itself is never read."""
    if (mode := os.environ.get("RAY_AUTH_MODE", "token")) != "token":
        said = f"RAY_AUTH_MODE={mode}: whoever reaches Ray's ports runs code"
        return Check("Ray token", State.warning, said, "unset RAY_AUTH_MODE")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path is None:
        return Check("Ray token", State.ok, "every run has a token of its own")
    if not Path(path).is_file():
        return Check("Ray token", State.wrong, f"RAY_AUTH_TOKEN_PATH: {path} does not exist", "name the token's file")
    if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
        return Check("Ray token", State.wrong, f"{path} can be read by others", f"chmod 600 {path}")
    return Check("Ray token", State.ok, f"in {path}, which this user alone reads")


def running_ray() -> Check:
    """Look for clusters of this user on this machine: one that was left behind holds memory."""
    heads = [
        str(process.pid)
        for process in psutil.process_iter(["name", "uids", "status"])
        if process.info["name"] == "gcs_server"
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and process.info["uids"].real == os.getuid()
    ]
    if not heads:
        return Check("Ray here", State.ok, "no cluster of this user runs on this machine")
    found = f"clusters of this user run here: {len(heads)} (gcs_server {', '.join(heads)})"
    return Check("Ray here", State.warning, found, "if no run of yours needs them: ray stop, which ends all of them")


def shared_memory() -> Check:
    """Check the room in /dev/shm, where Ray keeps its object store."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    found = f"{free / GIB:.2f} GiB free in /dev/shm, Ray takes {OBJECT_STORE_BYTES / GIB:.2f}"
    return Check(
        "shared memory", State.wrong if free < OBJECT_STORE_BYTES else State.ok, found, "a container takes --shm-size"
    )
