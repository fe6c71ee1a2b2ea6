"""Source shards of about 16 MB, found without reading the source, that any worker can read alone.

A source shard is a range of bytes of a `.jsonl` or `.tsv` file, a compressed file, some row groups of a Parquet file,
some files of a tree of texts, one shard of a dataset on the hub, or all of a built-in source. A folder, or a pattern
with `*`, of nothing but files of rows is read as rows; any other folder is a tree of texts.

A source is known by the hash of its files' whole content. A large file is not read again while its inode, size and
times are those it was hashed with: the time of its last change (ctime) is the system's, which no program sets back.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from replug.config.errors import RunError, UserError
from replug.data.files import cache_dir, file_sha256, write_json
from replug.data.sources.formats import (
    holds_rows,
    is_built_in,
    named_split,
    plan_file,
    plan_hub,
    plan_tree,
    read_items,
)
from replug.data.sources.records import FieldMap, Rejected, SourceShard, SourceText

SOURCE_SHARD_BYTES = 16 << 20
LARGE_BYTES = 64 << 20  # a smaller one is read in less time than a cache is worth
SETTLED_NS = 2 * 10**9  # a file that changed just now may change again within the clock's step
FILES_AT_ONCE = 4  # that are hashed: one stream does not have all that a disk can give


def plan_source_shards(source: str, in_one_piece: bool = False) -> list[SourceShard]:
    """Return the source shards of a `data.source`; files are `in_one_piece` if texts run over many lines."""
    shard_bytes = None if in_one_piece else SOURCE_SHARD_BYTES
    shards = [replace(shard, number=number) for number, shard in enumerate(_plan(source, shard_bytes))]
    if not shards:
        raise UserError(f"data.source: {source} holds no files")
    return shards


def of_split(source: str, split: str) -> str:
    """Return the source as it is; a dataset on the hub that names no split gets this one."""
    return named_split(source, split) if not is_built_in(source) and _files(source) is None else source


def read_source_shard(source_shard: SourceShard, fields: FieldMap) -> Iterator[tuple[int, SourceText | Rejected]]:
    """Yield the texts of a source shard, and what had to be rejected, with their lines; 0 stands for the whole file."""
    for line, item in read_items(source_shard, fields):
        if item is not None:
            yield line, item


def source_fingerprint(source: str) -> str | None:
    """Hash over the files' names and contents; None where the source is no file or folder.

    Preparing reads all of them too; large ones are hashed once, several at a time.
    """
    paths = _files(source)
    if paths is None:
        return None
    digest = hashlib.sha256()
    with ThreadPoolExecutor(FILES_AT_ONCE) as readers:
        for path, sha256 in zip(paths, readers.map(content_sha256, paths), strict=True):
            digest.update(os.fsencode(path.name) + f" {sha256}\n".encode())
    return digest.hexdigest()


def _plan(source: str, shard_bytes: int | None) -> Iterable[SourceShard]:
    if is_built_in(source):
        return [SourceShard("built_in", (source,))]
    paths = _files(source)
    if paths is None:
        return plan_hub(source)
    if Path(source).expanduser().is_file() or all(map(holds_rows, paths)):
        return (shard for path in paths for shard in plan_file(path, shard_bytes))
    return plan_tree(paths, _root(source), SOURCE_SHARD_BYTES)


def _files(source: str) -> list[Path] | None:
    """Return the files of a source in a fixed order. None means that it names no files."""
    path = Path(source).expanduser()
    if is_built_in(source):
        return None
    if "*" in source:
        anchor = Path(path.anchor)
        matching = sorted(file for file in anchor.glob(str(path.relative_to(anchor))) if file.is_file())
        if not matching:
            raise UserError(f"data.source: no file matches {source}")
        return matching
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file())
        return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(path).parts))
    if path.is_file():
        return [path]
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or holds_rows(path):
        raise UserError(f"data.source: {source} does not exist; expected a JSONL file, a folder or a dataset's name")
    return None


def _root(source: str) -> str:
    """The folder below which files are called by their paths: that of a pattern is what stands before its `*`."""
    path = Path(source.partition("*")[0]).expanduser()
    return str(path.parent if "*" in source and not source.partition("*")[0].endswith("/") else path)


def content_sha256(path: Path) -> str:
    """Hash the whole file."""
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
    times = {"modified_ns": status.st_mtime_ns, "changed_ns": status.st_ctime_ns}
    return {"inode": status.st_ino, "size": status.st_size, **times}


def _read(path: Path) -> dict | None:
    """Return a kept hash. None if it is missing or damaged: the file is read again."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and known.keys() == {"stamp", "sha256"} else None
