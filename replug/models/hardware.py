"""Resolve `dtype: auto` by the native products of the hardware, and check that torch sees the GPUs.

A torch with a newer CUDA than the driver's finds no GPU and raises no error: everything would run on the CPU.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import psutil
import torch

from replug.cluster.environment import allowed_cores
from replug.config.errors import UserError

DRIVER, DEVICES = Path("/proc/driver/nvidia/version"), Path("/dev")
HIDDEN = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES

Item = TypeVar("Item")
Result = TypeVar("Result")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def multiplies_bfloat16() -> bool:
    """Return whether bfloat16 products run in hardware: recent NVIDIA GPUs, AVX512-BF16, AMX, Arm with BF16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for `auto`, `float32`, `bfloat16` or `float16`."""
    if name == "auto":
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return DTYPES[name]


def dtype_name(name: str) -> str:
    """Return the name of `resolve_dtype`: float32, bfloat16 or float16."""
    return str(resolve_dtype(name)).removeprefix("torch.")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host's tensor. A GPU copies from pinned memory: a plain copy waits for all earlier work."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host. A GPU copies it into pinned memory after its work so far, asynchronously."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensor = tensor.to("cpu", non_blocking=True)  # torch pins it
        if tensor.device.type == "cuda":
            self._copied = torch.cuda.Event(blocking=True)  # the wait takes no core
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def is_there(self) -> bool:
        return self._copied is None or self._copied.query()

    def tensor(self) -> torch.Tensor:
        """Wait for the copy and return it. Raises the device's error if its work failed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


def available_cores() -> int:
    """Return the cores that this process may use: OMP_NUM_THREADS, else the cores of its container or SLURM step.

    Actors get the variable from `thread_env`, since Ray would set it to their share of CPUs.
    """
    setting = os.environ.get("OMP_NUM_THREADS") or str(allowed_cores())
    first = setting.partition(",")[0].strip()  # OpenMP's list has a number for each level of nested regions
    if not first.isdigit() or int(first) < 1:
        raise UserError(f"$OMP_NUM_THREADS is {setting!r}; expected a number of threads, such as 4")
    return int(first)


def default_device() -> torch.device:
    """Return the GPU visible to this process, else the CPU. Raises UserError for a GPU that torch cannot use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        check_gpus()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_gpus() -> None:
    """Raise UserError if torch cannot use this machine's GPUs: the CPU would silently do all the work."""
    if problem := unusable_gpus():
        raise UserError(f"{problem}. To run on the CPU, hide the GPUs: CUDA_VISIBLE_DEVICES= replug ...")


def unusable_gpus() -> str | None:
    """Return torch's version and the fix if a driver offers GPUs and torch finds none; None if they are hidden."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN
    if torch.cuda.is_available() or is_hidden or not DRIVER.exists():
        return None
    if not any(_opens(device) for device in DEVICES.glob("nvidia[0-9]*")):  # a container or a SLURM step may have none
        return None
    return (
        f"GPUs are here, but torch {torch.__version__} with CUDA {torch.version.cuda} cannot use them: nvidia-smi "
        "shows the driver, docs/clusters.md the version of torch for it"
    )


def _opens(device: Path) -> bool:
    try:
        device.open("rb+", buffering=0).close()
    except OSError:
        return False
    return True


def available_memory() -> int:
    """Return the free bytes of memory of the machine and of this container or job."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return free


def one_per_thread(compute: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the result of each item, in order; items are computed in parallel, each on one thread.

    Threads that share one batch wait for each other after every operation. That costs a little on an idle machine,
    and most of the time if another process holds a core.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) == 1:
        return [compute(item) for item in items]
    return list(_single_threads(threads).map(compute, items))


@cache
def _single_threads(count: int) -> ThreadPoolExecutor:
    """Make threads that compute alone. A thread's setting holds for all later ones, so it is restored at once."""
    threads, started = torch.get_num_threads(), Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # the first query fixes the thread's number, so it must come now
        started.wait()

    pool = ThreadPoolExecutor(count, initializer=begin)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)
    return pool
