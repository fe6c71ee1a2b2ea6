"""The GPUs of this machine: those that torch sees, or those that a rehearsal pretends.

Tests start a Ray cluster whose GPUs are numbers (tests/support/fake_cluster.py). The layout counts those, and models
compute on the processor. One variable in the environment of that cluster's processes says so. It holds the address of
that cluster, and `check_rehearsal` refuses every other: where the variable was left on, nothing runs.
"""

import json
import os
from dataclasses import asdict, dataclass

import torch

from replug.config.errors import UserError

VARIABLE = "REPLUG_REHEARSAL"
MEMORY_SHARE = "REPLUG_GPU_MEMORY_SHARE"  # of a process on a GPU that others compute on too


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The cluster that pretends: its address, and the GPUs of each of its nodes."""

    address: str
    gpus_of_node: int
    memory_gb: float

    def environment(self) -> dict[str, str]:
        """What its processes are started with."""
        return {VARIABLE: json.dumps(asdict(self))}


def rehearsal() -> Rehearsal | None:
    """The rehearsal that this process belongs to, if any."""
    stated = os.environ.get(VARIABLE)
    return Rehearsal(**json.loads(stated)) if stated else None


def check_rehearsal(address: str | None) -> None:
    """Raise UserError where a rehearsal's variable was left on and the run is another's."""
    rehearsed = rehearsal()
    if rehearsed is not None and rehearsed.address != address:
        raise UserError(
            f"{VARIABLE} is set, which makes a run compute without its GPUs, but ray.address is {address or 'not set'} "
            f"and not the rehearsal's {rehearsed.address}; expected it in the environment of no run: unset {VARIABLE}"
        )


def num_gpus() -> int:
    """GPUs of this machine that are handed out."""
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
    """Where a process that has its share of a GPU, or none, computes."""
    return "cuda" if wants_gpu and rehearsal() is None else "cpu"
