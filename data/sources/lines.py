"""Lines of files, compressed or not, in ranges of bytes: what the formats with a row on each line share.

A file's first bytes say how it is packed, whatever it is called, and name the formats that hold no lines. Its suffix
says what may be in it.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from replug.data.sources.records import Reason, Rejected, SourceShard

MAX_LINE_BYTES = 64 << 20
EXCERPT = 40  # characters of a line that is not JSON
COMPRESSED = (".gz", ".zst", ".bz2")
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "text": (".txt", ".text", ".tokens", ".raw"),
    "markup": (".md", ".markdown", ".mdx", ".rst", ".adoc", ".asciidoc"),
    "HTML": (".html", ".htm", ".xhtml"),
    "CSV": (".csv",),
}
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}  # by a file's first bytes
LFS_POINTER, HTML = "a pointer of Git LFS, whose file `git lfs pull` fetches", "HTML"
OTHER_FORMATS = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"PK\x03\x04": "Zip",
    b"%PDF": "PDF",
    b"SQLite format 3": "SQLite",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"version https://git-lfs": LFS_POINTER,
    b"<!DOCTYPE html": HTML,
    b"<!doctype html": HTML,
    b"<html": HTML,
}
HEAD_BYTES = 4096

UNREADABLE = (EOFError, OSError, zlib.error, pa.ArrowInvalid)  # what reading a damaged file raises

Line = tuple[int, bytes | Rejected]  # from 1 within the source shard


def read_lines(source_shard: SourceShard) -> Iterator[Line]:
    """Yield the lines that begin within the source shard; lines that are too long are skipped in parts."""
    name = source_shard.names[0]
    number = 0
    try:
        with open_file(Path(name)) as file:
            if source_shard.start:
                file.seek(source_shard.start - 1)
                skip_line(file)  # it began before
            while source_shard.stop is None or file.tell() < source_shard.stop:
                line = file.readline(MAX_LINE_BYTES)
                if not line:
                    return
                number += 1
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    skip_line(file)
                    detail = f"the line is longer than {MAX_LINE_BYTES} bytes"
                    yield number, Rejected(Reason.too_long, name, number, detail)
                else:
                    yield number, line
    except UNREADABLE as error:
        yield number, Rejected(Reason.damaged_file, name, number, f"unreadable after this line: {error}")


def json_object(line: bytes) -> dict[str, Any] | tuple[Reason, str]:
    """Return the object of a line of JSON, or why it is none."""
    try:
        row = DECODER.decode(line.decode("utf-8-sig"))  # Windows begins files with a byte order mark
    except UnicodeDecodeError as error:
        return Reason.not_utf8, f"not UTF-8 at byte {error.start} of the line; convert the file"
    except json.JSONDecodeError as error:
        begins = error.doc[:EXCERPT].strip()
        return Reason.invalid_json, f"not valid JSON: {error.msg} at column {error.colno} of {begins!r}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        return Reason.invalid_json, f"not valid JSON: {error}"
    if not isinstance(row, dict):
        return Reason.not_an_object, f"expected a JSON object on each line, found {type(row).__name__}"
    return row


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a name that occurs twice: which value counts is not said."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"an object has two fields named {twice(name for name, _ in pairs)!r}")
    return row


def twice(names: Iterable[str]) -> str | None:
    """Return the first name that occurs again, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def skip_line(file: BinaryIO) -> None:
    """Read to the end of the line without holding it."""
    while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass


def open_file(path: Path) -> Any:
    """Return the bytes of a file, unpacked."""
    packing = packing_of(path)
    if packing == "gzip":
        return gzip.open(path, "rb")
    if packing:
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), packing), 1 << 20)
    return path.open("rb")


def packing_of(path: Path) -> str | None:
    """Return how a file is packed, by its first bytes; None if it is not."""
    with path.open("rb") as file:
        head = file.read(max(map(len, PACKINGS)))
    return next((packing for magic, packing in PACKINGS.items() if head.startswith(magic)), None)


def other_format(path: Path) -> str | None:
    """Return the format of a file without lines of text, by its first bytes; None if it may have lines."""
    try:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES)
    except UNREADABLE:  # reading the file says what is wrong with it
        return None
    named = next((name for magic, name in OTHER_FORMATS.items() if head.startswith(magic)), None)
    return named or ("binary" if b"\0" in head else None)


def format_of(path: Path) -> str | None:
    """Return the format of a file by its suffix, of a compressed one by the suffix before; None if it is not known."""
    suffix = unpacked_suffix(path)
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def unpacked_suffix(path: Path) -> str:
    """Return a file's suffix in lower case, of a compressed one the suffix before."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix
