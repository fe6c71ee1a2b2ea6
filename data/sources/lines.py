"""Lines of files, compressed or not, in ranges of bytes: what the formats with a row on each line share."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from replug.data.sources.records import Reason, Rejected, SourceShard

MAX_LINE_BYTES = 64 << 20
csv.field_size_limit(MAX_LINE_BYTES)  # 128 KB otherwise, less than a long text
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

UNREADABLE = (EOFError, OSError, zlib.error, pa.ArrowInvalid)  # what reading a damaged file raises

Line = tuple[int, bytes | Rejected | None]  # from 1 within the source shard; None for a blank line


def byte_ranges(kind: str, path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    """Ranges of a file that cover it; all of it in one where it is compressed, or no size is given."""
    size = Path(path).stat().st_size
    if shard_bytes is None or Path(path).suffix.lower() in COMPRESSION:
        yield SourceShard(0, kind, (path,), size)
        return
    for start in range(0, max(size, 1), shard_bytes):
        stop = min(start + shard_bytes, size)
        yield SourceShard(0, kind, (path,), stop - start, start, stop)


def read_lines(source_shard: SourceShard) -> Iterator[Line]:
    """The lines that begin within the source shard; one that is too long is passed over in parts."""
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
                    yield number, line if line.strip() else None
    except UNREADABLE as error:
        yield number, Rejected(Reason.damaged_file, name, number, f"unreadable after this line: {error}")


def json_object(line: bytes) -> dict[str, Any] | tuple[Reason, str]:
    """Return the object of a line of JSON, or why it is none."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # Windows begins files with a byte order mark
    except UnicodeDecodeError as error:
        return Reason.not_utf8, f"not UTF-8 at byte {error.start} of the line; convert the file"
    except json.JSONDecodeError as error:
        return Reason.invalid_json, f"not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        return Reason.invalid_json, f"not valid JSON: {error}"
    if not isinstance(row, dict):
        return Reason.not_an_object, f"expected a JSON object, found {type(row).__name__}"
    return row


def table_cells(line: bytes) -> list[str] | tuple[Reason, str]:
    """Return the cells of a line of a table with tabs, or why there are none."""
    try:
        return next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")], delimiter="\t", strict=True))
    except UnicodeDecodeError as error:
        return Reason.not_utf8, f"not UTF-8 at byte {error.start} of the line; convert the file"
    except csv.Error as error:
        return Reason.invalid_tsv, f"not valid TSV ({error}); expected a row on each line, quotes doubled"


def skip_line(file: BinaryIO) -> None:
    """Read to the end of the line without holding it."""
    while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass


def open_file(path: Path) -> Any:
    """The bytes of a file, unpacked by its last suffix."""
    compression = COMPRESSION.get(path.suffix.lower())
    if compression == "gzip":
        return gzip.open(path, "rb")
    if compression:
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), compression), 1 << 20)
    return path.open("rb")
