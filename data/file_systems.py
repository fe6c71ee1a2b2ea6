"""What kind of file system a path lies on, as Linux says.

A file system that several machines share has locks that are slow or leases, and no memory that is shared between them:
SQLite's write-ahead log needs the latter. What is neither known as such nor mounted through FUSE counts as local.
"""

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SHARED = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "ocfs2", "orangefs",
    "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "weka",
)  # fmt: skip


def shared_file_system(path: Path) -> str | None:
    """The type of the file system that `path` will lie on, such as nfs4; None where it is this machine's own."""
    found = file_system(path)
    return found if found.startswith(SHARED) else None


def file_system(path: Path) -> str:
    """The type of the mount nearest above a path, there or not; of several at one place the last, which hides the
    others. Empty where the system has no table of them.
    """
    if not MOUNTS.exists():  # another system than Linux
        return ""
    real = path.resolve()
    nearest, kind = Path("/"), ""
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = Path(_unescaped(before.split(" ")[4]))
        if real.is_relative_to(place) and len(place.parts) >= len(nearest.parts):
            nearest, kind = place, after.split(" ")[0]
    return kind


def _unescaped(text: str) -> str:
    """Blanks and backslashes are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
