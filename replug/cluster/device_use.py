"""How long each role worked on each device: what actors say with their results, added up where these arrive.

A device is a GPU, `NODE:NUMBER` by Ray's number of it, or the processors of a node, `NODE:cpu`. Clocks of nodes differ,
so seconds of work travel, and no times of day. They count when the result arrives.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

ROLES = ("score", "embed", "search", "train")
BusySeconds = dict[str, dict[str, float]]  # by device and role


@dataclass(frozen=True, slots=True)
class Busy:
    """What one result took its process: seconds of the process's own clock, on each of its devices."""

    seconds: float
    devices: tuple[str, ...]


class DeviceUse:
    """Seconds of work since the last `take`. Threads may note at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: BusySeconds = {}

    def note(self, role: str, busy: Busy) -> None:
        with self._lock:
            for device in busy.devices:
                add_seconds(self._busy, device, role, busy.seconds)

    def take(self) -> BusySeconds:
        """And begin anew."""
        with self._lock:
            taken, self._busy = self._busy, {}
        return taken


USE = DeviceUse()  # Ray is one for each process, and so are its devices


def add_seconds(busy: BusySeconds, device: str, role: str, seconds: float) -> None:
    of_device = busy.setdefault(device, {})
    of_device[role] = of_device.get(role, 0.0) + seconds


def own_devices() -> tuple[str, ...]:
    """Those of this actor; none in a process that is no actor of Ray's."""
    import ray  # for who searches in this process it is not there

    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return ()
    return devices_of(ray.util.get_node_ip_address(), context.get_accelerator_ids()["GPU"])


def devices_of(node: str, gpus: Sequence[str]) -> tuple[str, ...]:
    """The names of a process's devices, of an LM over several GPUs all of these."""
    return tuple(f"{node}:{gpu}" for gpu in gpus) or (f"{node}:cpu",)
