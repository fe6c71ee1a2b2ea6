"""The GPUs of this machine, and how long each role worked on them.

`nvidia-smi` says what is free of a GPU's memory and whether several processes may use it; it makes no context there.

Actors say with their results how many seconds they worked. A device is a GPU, `NODE:NUMBER` by Ray's number of it, or
the processors of a node, `NODE:cpu`.
"""

import math
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MEMORY_BOUND = "REPLUG_GPU_MEMORY_BOUND"  # bytes of a process on a GPU that others compute on too
SMI_SECONDS = 60.0  # for nvidia-smi, which wakes GPUs that sleep


def gpu_state(count: int | None = None) -> tuple[float, bool] | None:
    """Return the bytes that are free on each GPU that this process sees, and whether one takes a single process only.

    `count` means the first GPUs, by default all. Where they differ, the fullest one counts. None without GPUs.
    """
    seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())][:count]
    if not seen:
        return None
    known = _smi_rows()
    rows = [known.get(str(gpu.uuid), (math.inf, "Default")) for gpu in seen]
    # Without nvidia-smi, as on AMD's GPUs and in some containers, all memory counts as free.
    free = min(min(float(gpu.total_memory), num_bytes) for gpu, (num_bytes, _) in zip(seen, rows, strict=True))
    return free, any(mode.startswith("Exclusive") for _, mode in rows)


def _smi_rows() -> dict[str, tuple[float, str]]:
    """Return the free bytes and the compute mode of each GPU of the machine, by the name that torch has of it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return {}
    query = [program, "--query-gpu=uuid,memory.free,compute_mode", "--format=csv,noheader,nounits"]
    printed = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS).stdout
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines()]
    return {
        uuid.removeprefix("GPU-"): (float(free) * 2**20 if free.isdigit() else math.inf, mode)
        for uuid, free, mode in (row for row in rows if len(row) == 3)
    }


def keep_to_memory_bound(num_bytes: float | None = None, device: int = 0) -> None:
    """Let torch take no more of a GPU than this process's part, by default the one that it was started with.

    A cache that grows would take what is counted for another process. And a pass that memory does not hold is halved,
    which changes last bits: it may follow from this process's work alone.
    """
    num_bytes = num_bytes or float(os.environ.get(MEMORY_BOUND, 0.0))
    if num_bytes and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / whole), device)


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
