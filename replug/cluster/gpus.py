"""The GPUs of this machine, those that torch sees or a rehearsal pretends, and how long each role worked on them.

Tests start a Ray cluster whose GPUs are numbers (tests/support/fake_cluster.py). The layout counts those, and models
compute on the processor. A variable in the environment of its processes says so.

Actors say with their results how many seconds they worked. A device is a GPU, `NODE:NUMBER` by Ray's number of it, or
the processors of a node, `NODE:cpu`.
"""

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

VARIABLE = "REPLUG_REHEARSAL"
MEMORY_SHARE = "REPLUG_GPU_MEMORY_SHARE"  # of a process on a GPU that others compute on too


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The cluster that pretends: the GPUs of each of its nodes."""

    gpus_of_node: int
    memory_gb: float

    def environment(self) -> dict[str, str]:
        """Return the environment variables that its processes start with."""
        return {VARIABLE: json.dumps(asdict(self))}


def rehearsal() -> Rehearsal | None:
    """Return the rehearsal that this process belongs to, if any."""
    stated = os.environ.get(VARIABLE)
    return Rehearsal(**json.loads(stated)) if stated else None


def num_gpus() -> int:
    """Return the number of GPUs that this machine hands out."""
    rehearsed = rehearsal()
    return rehearsed.gpus_of_node if rehearsed else torch.cuda.device_count()


def keep_to_memory_share(share: float | None = None, device: int = 0) -> None:
    """Let torch take no more of a GPU than this process's part, by default the one that it was started with.

    A cache that grows would take what is counted for another process. And a pass that memory does not hold is halved,
    which changes last bits: it may follow from this process's work alone.
    """
    share = share or float(os.environ.get(MEMORY_SHARE, 0.0))
    if share and rehearsal() is None:
        torch.cuda.set_per_process_memory_fraction(share, device)


def torch_device(wants_gpu: bool) -> str:
    """Return where a process computes that has a share of a GPU, or none."""
    return "cuda" if wants_gpu and rehearsal() is None else "cpu"


# Busy seconds --------------------------------------------------------------------------------------------------------

ROLES = ("score", "embed", "search", "train")
BusySeconds = dict[str, dict[str, float]]  # by device and role


@dataclass(frozen=True, slots=True)
class Busy:
    """The seconds that one result took on each device of its process."""

    seconds: float
    devices: tuple[str, ...]


class DeviceUse:
    """Add up seconds of work since the last `take`; threads may note at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: BusySeconds = {}

    def note(self, role: str, busy: Busy) -> None:
        with self._lock:
            for device in busy.devices:
                add_seconds(self._busy, device, role, busy.seconds)

    def take(self) -> BusySeconds:
        """Return them and begin anew."""
        with self._lock:
            taken, self._busy = self._busy, {}
        return taken


USE = DeviceUse()  # Ray is one for each process, and so are its devices


def add_seconds(busy: BusySeconds, device: str, role: str, seconds: float) -> None:
    of_device = busy.setdefault(device, {})
    of_device[role] = of_device.get(role, 0.0) + seconds


def own_devices() -> tuple[str, ...]:
    """Return the devices of this actor; none in a process that is not an actor."""
    import ray  # for who searches in this process it is not there

    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return ()
    return devices_of(ray.util.get_node_ip_address(), context.get_accelerator_ids()["GPU"])


def devices_of(node: str, gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a process's devices."""
    return tuple(f"{node}:{gpu}" for gpu in gpus) or (f"{node}:cpu",)
