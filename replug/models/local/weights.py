"""Which weights a folder holds: hashed once in a run, by whoever starts it, and compared by the rest.

A hash reads every byte, which for a 13B model is 26 GB. Replicas get it with the names, sizes and times of change of
the files it was made from. Who finds the same ones has the same weights; who does not, such as a node with a copy of
its own, reads them.
"""

import hashlib
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

LARGE_BYTES = 10**9  # worth a line in the log


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes with a file's content, without reading it."""

    name: str
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class HashedFiles:
    """The hash of a folder's configuration, tokenizer and weights, and the files it was made from."""

    stamps: tuple[FileStamp, ...]
    digest: str


def hashed_files(path: str, known: HashedFiles | None = None) -> HashedFiles | None:
    """Of the files as they are now: `known` where they are those it was made from. None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    stamps = tuple(_stamp(file) for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]))
    return known if known is not None and known.stamps == stamps else HashedFiles(stamps, _digest(folder, stamps))


def lm_identity(path: str, dtype: torch.dtype, known: HashedFiles | None = None) -> str:
    """A local model's configuration, tokenizer and weights, with the dtype it runs in."""
    files = hashed_files(path, known)
    return f"{files.digest if files else path}:{str(dtype).removeprefix('torch.')}"


@lru_cache(maxsize=8)  # a process asks for an identity more than once
def _digest(folder: Path, stamps: tuple[FileStamp, ...]) -> str:
    num_bytes = sum(stamp.num_bytes for stamp in stamps)
    if num_bytes > LARGE_BYTES:
        log.info(f"hashing the {num_bytes / 1e9:.0f} GB of {folder}, so that its scores are known again")
    digest = hashlib.blake2b(digest_size=16)
    for stamp in stamps:
        with (folder / stamp.name).open("rb") as stream:
            digest.update(stamp.name.encode() + hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def _stamp(file: Path) -> FileStamp:
    status = file.stat()
    return FileStamp(file.name, status.st_size, status.st_mtime_ns)
