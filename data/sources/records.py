"""The files of a source, their lines, and the records that reading them passes on; rejected rows and files by reason.

Every rejected case is counted, and the first hundred of each reason are listed.

A file's first bytes, not its name, decide how it is packed and identify formats without lines. Its suffix gives the
expected content.
"""

import gzip
import io
import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

log = logging.getLogger(__name__)

EXAMPLES = 100  # listed for each reason
HEAD_BYTES = 4096  # enough to tell a format
MAX_LINE_BYTES = 64 << 20
COMPRESSED = (".gz", ".zst", ".bz2")
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "text": (".txt", ".text", ".tokens", ".raw"),
    "markup": (".md", ".markdown", ".mdx", ".rst"),
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
UNREADABLE = (EOFError, OSError, zlib.error, pa.ArrowInvalid)  # errors of damaged files


def readable_name(name: str) -> str:
    """Return a file's name as text: bytes of other encodings are spelt out, such as `\\xe9`."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Rejected:
    """One row or file that was not taken. `line` counts from 1; 0 stands for the whole file."""

    reason: str  # one word to count cases by, such as not_utf8
    file: str
    line: int
    detail: str

    def __str__(self) -> str:
        return f"{readable_name(self.file)}{f':{self.line}' if self.line else ''}: {self.detail} ({self.reason})"


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A part of the source that one worker reads alone.

    `start` and `stop` count bytes, row groups or shards, by its format.
    """

    kind: str  # the format's name
    names: tuple[str, ...]  # files, or the name of the source
    start: int = 0
    stop: int | None = None
    root: str = ""  # of a tree of texts: their ids are paths below it
    number: int = 0  # among all of the source


@dataclass(frozen=True, slots=True)
class SourceText:
    """One whole text before it is cut. `named` is False if its id is a hash of its words, since none was given.

    Prose is cut at headings and sentences, other texts by tokens alone.
    """

    id: str
    text: str
    domain: str
    named: bool = True
    is_prose: bool = False


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Names of the fields of a raw row; dots reach into nested fields (`meta.pile_set_name`).

    `new_text_at` is for rows or lines that are parts of texts: a pattern for the first line of a text.
    """

    text: str = "text"
    id: str = "id"
    domain: str = "domain"
    new_text_at: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, str], new_text_at: str | None = None) -> "FieldMap":
        """Return the map that `data.fields` describes: from the row's name of a field to ours."""
        text, id, domain = ({new: old for old, new in fields.items()}.get(new, new) for new in ("text", "id", "domain"))
        return cls(text, id, domain, new_text_at)


# A line or row of a source shard, counted from 1; None for a line that is not a row: blank, or a table's header.
Row = tuple[int, dict[str, Any] | Rejected | None]
Item = tuple[int, SourceText | Rejected | None]  # the text of a row; 0 stands for the whole file


def say_unread(source: Path | str, names: Collection[str], read: Sequence[str]) -> None:
    """Warn once about the unread fields of a file or a source, and list the readable ones."""
    if unread := [name for name in names if name not in read]:
        found = names_in(name for name in read if name in names)
        log.warning(
            f"{source}: fields that are not read: {names_in(unread)}; read are {found}, and a row may have "
            f"{', '.join(read)}"
        )


def names_in(row: Iterable[Any]) -> str:
    """Return the names of a row's fields for a message; a table without a header has texts there."""
    return ", ".join(str(name)[:40] for name in row) or "none"


def nested(row: Mapping[str, Any], path: str) -> Any:
    """Return the field of a row by its name, or by a path A.B into nested fields; else None."""
    if path in row or "." not in path:
        return row.get(path)
    outer, _, inner = path.partition(".")
    within = row.get(outer)
    return nested(within, inner) if isinstance(within, dict) else None


# Files ------------------------------------------------------------------------------------------------------


def format_of(path: Path) -> str | None:
    """Return the format of a file by its suffix, of a compressed one by the suffix before; None if unknown."""
    suffix = path.suffix.lower()
    suffix = Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def packing_of(path: Path) -> str | None:
    """Return how a file is packed, by its first bytes; None if it is not."""
    with path.open("rb") as file:
        head = file.read(max(map(len, PACKINGS)))
    return next((packing for magic, packing in PACKINGS.items() if head.startswith(magic)), None)


def open_file(path: Path) -> Any:
    """Return the bytes of a file, unpacked."""
    packing = packing_of(path)
    if packing == "gzip":
        return gzip.open(path, "rb")
    if packing:
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), packing), 1 << 20)
    return path.open("rb")


def first_bytes(path: Path, num: int = HEAD_BYTES) -> bytes:
    """Return the first bytes of a file, unpacked; empty for a file that cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(num)
    except UNREADABLE:
        return b""


def other_format(path: Path) -> str | None:
    """Return the format of a file without lines of text, by its first bytes; None if it may have lines."""
    head = first_bytes(path)
    named = next((name for magic, name in OTHER_FORMATS.items() if head.startswith(magic)), None)
    return named or ("binary" if b"\0" in head else None)


# Lines ------------------------------------------------------------------------------------------------------


def read_lines(source_shard: SourceShard) -> Iterator[tuple[int, str | Rejected]]:
    """Yield the lines that begin within the source shard; lines that are too long are skipped in parts."""
    name, number = source_shard.names[0], 0
    try:
        with open_file(Path(name)) as file:
            if source_shard.start:
                file.seek(source_shard.start - 1)
                _skip_line(file)  # it began before
            while source_shard.stop is None or file.tell() < source_shard.stop:
                line = file.readline(MAX_LINE_BYTES)
                if not line:
                    return
                number += 1
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    _skip_line(file)
                    detail = f"the line is longer than {MAX_LINE_BYTES} bytes"
                    yield number, Rejected("too_long", name, number, detail)
                    continue
                try:
                    text = line.decode("utf-8-sig")  # Windows begins files with a byte order mark
                except UnicodeDecodeError as error:
                    detail = f"not UTF-8 at byte {error.start} of the line; convert the file"
                    yield number, Rejected("not_utf8", name, number, detail)
                    continue
                yield number, text
    except UNREADABLE as error:
        yield number, Rejected("damaged_file", name, number, f"unreadable after this line: {error}")


def _skip_line(file: BinaryIO) -> None:
    """Read to the end of the line without holding it."""
    while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass
