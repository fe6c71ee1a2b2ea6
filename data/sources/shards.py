"""What a source is read in: source shards of about 16 MB, found without reading it, that any worker can read alone.

| source | a source shard is |
|---|---|
| `.jsonl`, `.tsv` | a range of bytes of one file |
| `.jsonl.gz`, `.jsonl.zst`, `.jsonl.bz2`, the same of `.tsv` | a file |
| `.parquet` | some of a file's row groups |
| a tree of text files | some of the files |
| a dataset on the hub | one of its shards, streamed |
| `package:NAME`, `stand_in` | all of it |

A folder, or a pattern with `*`, of nothing but row files is read as rows; any other folder is a tree of texts.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replug.configs.errors import UserError

SOURCE_SHARD_BYTES = 16 << 20
ROW_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv", ".parquet": "parquet"}
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tokens", ".raw")
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A part of the source. `start` and `stop` are bytes, row groups, or the number of a hub's shard."""

    number: int
    kind: str  # jsonl, tsv, parquet, text, hub or built_in
    names: tuple[str, ...]  # files, or what the source is called
    size: int  # bytes, for showing progress
    start: int = 0
    stop: int | None = None
    root: str = ""  # of a tree of texts, whose ids are paths below it


def plan_source_shards(source: str, in_one_piece: bool = False) -> list[SourceShard]:
    """The source shards of a `data.source`; files are `in_one_piece` where texts run over many lines."""
    parts = [SourceShard(number, *part) for number, part in enumerate(_parts(source, in_one_piece))]
    if not parts:
        raise UserError(f"data.source: {source} holds no files")
    return parts


def source_fingerprint(source: str) -> str | None:
    """Hash over the files' names, sizes, first and last mebibytes; None where the source is no file or folder."""
    paths = _files(source)
    if paths is None:
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(os.fsencode(path.name) + f" {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(path.stat().st_size - (1 << 20), 0))
            digest.update(file.read())
    return digest.hexdigest()


def file_kind(path: Path) -> tuple[str | None, str | None]:
    """Which rows a file holds (None: it is no row file), and how it is compressed."""
    suffix, compression = path.suffix.lower(), COMPRESSION.get(path.suffix.lower())
    if compression:
        suffix = Path(path.stem).suffix.lower()
    return ROW_KINDS.get(suffix), compression


def _parts(source: str, in_one_piece: bool) -> Iterator[tuple]:
    paths = _files(source)
    if paths is None:
        yield from [("built_in", (source,), 0)] if is_built_in(source) else _hub_parts(source)
    elif Path(source).expanduser().is_file():
        yield from _file_parts(paths[0], in_one_piece)
    elif all(file_kind(path)[0] for path in paths):
        for path in paths:
            yield from _file_parts(path, in_one_piece)
    else:
        yield from _text_parts(paths, _root(source))


def is_built_in(source: str) -> bool:
    return source == "stand_in" or source.startswith("package:")


def _files(source: str) -> list[Path] | None:
    """The files of a source in a fixed order; None where it names no files."""
    path = Path(source).expanduser()
    if is_built_in(source):
        return None
    if "*" in source:
        anchor = Path(path.anchor)
        found = sorted(file for file in anchor.glob(str(path.relative_to(anchor))) if file.is_file())
        if not found:
            raise UserError(f"data.source: no file matches {source}")
        return found
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    if path.is_file():
        return [path]
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or file_kind(path)[0]:
        raise UserError(f"data.source: {source} does not exist; expected a JSONL file, a folder or a dataset's name")
    return None


def _root(source: str) -> str:
    """The folder below which files are called by their paths: that of a pattern is what stands before its `*`."""
    path = Path(source.partition("*")[0]).expanduser()
    return str(path.parent if "*" in source and not source.partition("*")[0].endswith("/") else path)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_parts(path: Path, in_one_piece: bool) -> Iterator[tuple]:
    kind, compression = file_kind(path)
    size = path.stat().st_size
    if kind is None and path.suffix.lower() in TEXT_SUFFIXES:
        yield "text", (str(path),), size
    elif kind == "parquet" and not in_one_piece:
        yield from _row_groups(path)
    elif kind == "parquet" or compression or in_one_piece:
        yield kind or "jsonl", (str(path),), size
    else:
        for start in range(0, max(size, 1), SOURCE_SHARD_BYTES):
            stop = min(start + SOURCE_SHARD_BYTES, size)
            yield kind or "jsonl", (str(path),), stop - start, start, stop


def _row_groups(path: Path) -> Iterator[tuple]:
    try:
        metadata = pq.ParquetFile(path).metadata
    except (pa.ArrowInvalid, OSError):  # reading the source shard says what is wrong with it
        yield "parquet", (str(path),), path.stat().st_size
        return
    first, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= SOURCE_SHARD_BYTES or group == metadata.num_row_groups - 1:
            yield "parquet", (str(path),), size, first, group + 1
            first, size = group + 1, 0


def _text_parts(paths: Iterable[Path], root: str) -> Iterator[tuple]:
    names: list[str] = []
    size = 0
    for path in paths:
        names.append(str(path))
        size += path.stat().st_size
        if size >= SOURCE_SHARD_BYTES:
            yield "text", tuple(names), size, 0, None, root
            names, size = [], 0
    if names:
        yield "text", tuple(names), size, 0, None, root


def _hub_parts(name: str) -> Iterator[tuple]:
    for shard in range(open_hub(name).num_shards):
        yield "hub", (name,), 0, shard


def open_hub(name: str):  # type: ignore[no-untyped-def]
    """The train split of a dataset, streamed; `NAME:CONFIGURATION` for one that has several."""
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    try:
        return load_dataset(path, configuration or None, split="train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"data.source: cannot open the dataset {name}: {str(error).strip().splitlines()[0]}") from error
