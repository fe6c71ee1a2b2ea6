"""The hash of a file's whole content, read once: an edit anywhere in it makes it another file.

A large file is not read again while its inode, size and times are those it was hashed with. The time of its last change
(ctime) is the system's own, which no program sets back.
"""

import hashlib
import json
import os
import time
from pathlib import Path

from replug.config.errors import RunError
from replug.data.cache_folder import cache_dir
from replug.data.files import file_sha256, write_json

LARGE_BYTES = 64 << 20  # a smaller one is read in less time than a cache is worth
SETTLED_NS = 2 * 10**9  # a file that changed just now may change again within the clock's step


def content_sha256(path: Path) -> str:
    """Of all of the file."""
    stamp = _stamp(path)
    if stamp["size"] < LARGE_BYTES:
        return file_sha256(path)
    kept = cache_dir() / "file_hashes" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    if (known := _read(kept)) is not None and known["stamp"] == stamp:
        return known["sha256"]
    sha256 = file_sha256(path)
    if _stamp(path) != stamp:
        raise RunError(f"{path} was changed while it was read; run again when nobody writes it")
    if time.time_ns() - stamp["changed_ns"] > SETTLED_NS:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"stamp": stamp, "sha256": sha256})
    return sha256


def _stamp(path: Path) -> dict[str, int]:
    status = path.stat()
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }


def _read(path: Path) -> dict | None:
    """None where there is none, or a damaged one: the file is read again."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and known.keys() == {"stamp", "sha256"} else None
