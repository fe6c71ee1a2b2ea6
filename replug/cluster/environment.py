"""Environment variables for torch, gloo and NCCL, a private folder, and limits of processes.

gloo and NCCL look for the network interface by the host's name, which may resolve to loopback; Ray's address of the
node does not.
"""

import atexit
import os
import resource
import shutil
import tempfile
from functools import cache
from pathlib import Path

import psutil

LONGEST_PARENT = 20  # characters of the folder above the private one
# LM, builders and trainer share the cores. A thread that spins at a barrier keeps the thread that it waits for from
# running; this is libgomp's own count for more threads than cores, which it cannot see across processes.
SHARED_CORES = {"GOMP_SPINCOUNT": "1000"}
# Passes of many sizes leave gaps in segments of a fixed size, so that a GPU with free memory runs out of it.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def torch_environment() -> dict[str, str]:
    """Return torch's variables for every process of a run; a user's own allocator settings take precedence."""
    has_own = any(os.environ.get(name) not in (None, *ALLOCATOR.values()) for name in ALLOCATOR_NAMES)
    return SHARED_CORES if has_own else {**SHARED_CORES, **ALLOCATOR}


@cache
def private_folder() -> Path:
    """Make a folder of mode 0700 for this process, since Ray opens its sockets to everybody; it is removed at the end.

    Not in a deep $TMPDIR: the path of a socket has 107 characters at most, of which Ray needs 70.
    """
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="replug-", dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# NCCL takes a bare name for a prefix; `=` makes it exact.
VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}


def allowed_cores() -> int:
    """Return the cores that the system lets this process use."""
    return len(os.sched_getaffinity(0))


def use_interface_of(address: str) -> None:
    """Set the network interface of an address for gloo and NCCL in this process, unless the user has set one."""
    for name, known in psutil.net_if_addrs().items():
        if any(one.address == address for one in known):
            for variable, form in VARIABLES.items():
                os.environ.setdefault(variable, form.format(name))


# Processes that read files of others --------------------------------------------------------------------------------


def limit_process(memory_bytes: int) -> None:
    """Limit this process's address space and disable core files; allocations beyond the limit fail."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
