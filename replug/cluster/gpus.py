"""The memory of this machine's GPUs that is free, and the part of it that a process may take.

`nvidia-smi` says what is free of a GPU's memory and whether several processes may use it; it makes no context there.
"""

import math
import os
import shutil
import subprocess

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
