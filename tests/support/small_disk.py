"""A disk of a few megabytes that can be filled to the page: a tmpfs, which only root can mount."""

import os
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096


class SmallDisk:
    """A file of ballast takes all but what it is told to leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def leave(self, num_bytes: int) -> None:
        """Fill it up but for so many bytes, whole pages."""
        self.free()
        pages = os.statvfs(self.folder).f_bavail - num_bytes // PAGE
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, pages * PAGE)

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


def space_of(paths: Iterable[Path]) -> int:
    """Bytes that files, and those in folders, take on such a disk."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mounted at a folder; skips the test, and warns, where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,huge=never", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        warnings.warn(f"NOT TESTED what a full disk does to a refresh: {done.stderr.strip()}", stacklevel=2)
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
