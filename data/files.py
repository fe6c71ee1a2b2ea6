"""Write files so that a reader sees all of the old or all of the new; name a full disk, or a limit.

Machines that share a file system share no memory, which SQLite's write-ahead log needs. A file system counts as local
unless its type is known to be shared or is FUSE.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EMFILE, ENFILE, ENOMEM
from pathlib import Path
from typing import Any

import psutil

from replug.config.errors import RunError, UserError

SYSTEM_LIMIT = (
    "this is a limit of the system and the file may be whole: see `ulimit -n`, `ulimit -v` and "
    "/proc/sys/vm/max_map_count on that machine"
)
FULL = re.compile(r"\(os error \d+\)|inline_container\.cc")  # full-disk errors of safetensors, tokenizers and torch


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: object) -> None:
    """Replace a file by this content; half a surrogate pair is escaped as in JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, text.encode(errors="backslashreplace"))


def read_json(path: Path, fix_hint: str) -> Any:
    """Return the content of a JSON file. Raises UserError with the `fix_hint` if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged, it is not valid JSON ({error}); {fix_hint}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader sees all of the old or all of the new."""
    with replacing(path) as partial:
        partial.unlink(missing_ok=True)  # else a write would follow a link at this path
        with partial.open("xb") as file:
            file.write(content)


def as_other_files(folder: Path) -> None:
    """Give a folder and all in it the permissions of files that this user makes.

    safetensors writes files that only their owner can read, and temporary folders have the same restriction.
    """
    probe = folder / ".permissions"  # os.umask reads the umask only by setting it, for all threads
    probe.mkdir()
    allowed = probe.stat().st_mode
    probe.rmdir()
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & allowed)


def persist(path: Path) -> None:
    """Flush a file's bytes to the disk; a mark may be written afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def writing(partial: Path) -> Iterator[None]:
    """Remove a file or folder that the disk does not take in this block, and raise RunError with its name."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not FULL.search(str(error)):
            raise
        if (reason := getattr(error, "strerror", None)) is None:
            reason = f"{error}; {shutil.disk_usage(partial.parent).free / 1e6:.1f} MB are free there"
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise RunError(f"{partial} cannot be written: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and rename it to `path` when the block has ended."""
    partial = path.with_name(path.name + ".partial")
    with writing(partial):
        yield partial
        partial.replace(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise RunError if the system fails to read an existing file, which need not be damaged."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        limit = f"; {SYSTEM_LIMIT}" if error.errno in (EMFILE, ENFILE, ENOMEM) else ""
        raise RunError(f"{path} cannot be read: {error.strerror or error}{limit}") from error


def cache_dir() -> Path:
    """Return $REPLUG_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REPLUG_CACHE") or Path(base) / "replug")


SHARED = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "ocfs2", "orangefs",
    "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "weka",
)  # fmt: skip


def shared_file_system(path: Path) -> str | None:
    """Return the type of the file system that `path` will lie on, such as nfs4. None means this machine's own."""
    real, nearest, kind = path.resolve(), Path("/"), ""
    for mount in psutil.disk_partitions(all=True):  # the nearest above the path; the last of several hides the others
        place = Path(mount.mountpoint)
        if real.is_relative_to(place) and len(place.parts) >= len(nearest.parts):
            nearest, kind = place, mount.fstype
    return kind if kind.startswith(SHARED) else None
