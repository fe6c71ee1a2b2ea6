"""Ray's agents, which outlive a raylet that was killed: for up to a minute they try to tell a GCS that is gone.

A raylet is killed where it hangs, and by the system where the process that started it ends at once.
"""

from collections.abc import Iterable
from contextlib import suppress

import psutil


def ray_children() -> list[psutil.Process]:
    """Processes below this one that Ray has named: agents and workers of clusters that this process has made."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::"):
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
