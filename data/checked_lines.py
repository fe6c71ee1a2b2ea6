"""JSON lines with a checksum each: a row that a disk, a kill or a second writer has damaged is told from a whole one.

A line ends in `, "checksum": "0a1b2c3d"}`, the hash of the bytes before it, so that a flip anywhere in it is noticed.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

LINE = re.compile(rb'(\{.+), "checksum": "([0-9a-f]{8})"\}')


def checked_line(row: Mapping[str, Any]) -> bytes:
    """The row, which is not empty, as a line with its checksum and newline."""
    body = json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace").removesuffix(b"}")
    return body + b', "checksum": "' + _checksum(body) + b'"}\n'


def read_checked_line(line: bytes) -> dict[str, Any] | None:
    """The row of a line, which may end in its newline; None where it is not what was written."""
    found = LINE.fullmatch(line.removesuffix(b"\n"))
    if found is None or _checksum(found[1]) != found[2]:
        return None
    return json.loads(found[1] + b"}")


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=4).hexdigest().encode()
