"""Raw texts out of the source shards of a source; what cannot be read is handed on with its reason, never passed over.

Each item comes with where it stands: the file, and the line or row counted from the source shard's first, from 1.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from replug.configs.errors import RunError
from replug.data.sampling import content_hash
from replug.data.sources.rejected import Reason, Rejected
from replug.data.sources.shards import SourceShard, file_kind, open_hub

MAX_LINE_BYTES = 64 << 20
ROWS_AT_A_TIME = 256
csv.field_size_limit(MAX_LINE_BYTES)  # 128 KB otherwise, less than a long text


@dataclass(frozen=True, slots=True)
class SourceText:
    """One whole text before it is cut. `named` is False where its id is a hash of its words, for want of another."""

    id: str
    text: str
    domain: str
    named: bool = True


@dataclass(frozen=True, slots=True)
class Passed:
    """A line that is no row: blank, or a table's header."""

    line: int


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Which fields of a raw row hold what; dots reach into nested fields (`meta.pile_set_name`).

    `new_text_at` is for rows or lines that are parts of texts: an expression that a text's first line matches.
    """

    text: str = "text"
    id: str = "id"
    domain: str = "domain"
    new_text_at: str | None = None
    max_characters: int = 16 << 20


Item = SourceText | Rejected
Line = tuple[int, bytes] | Rejected | Passed
Row = tuple[int, dict[str, Any]] | Rejected | Passed


def read_source_shard(source_shard: SourceShard, fields: FieldMap) -> Iterator[tuple[int, Item]]:
    """The texts of a source shard, and what had to be rejected, each with its line."""
    for line, item in read_lines(source_shard, fields):
        if not isinstance(item, Passed):
            yield line, item


def read_lines(source_shard: SourceShard, fields: FieldMap) -> Iterator[tuple[int, Item | Passed]]:
    """As `read_source_shard`, with the lines that hold nothing, so that all can be counted."""
    if source_shard.kind == "built_in":
        return enumerate(_built_in(source_shard.names[0]), start=1)
    if source_shard.kind == "text":
        return _texts_of_files(source_shard, fields)
    rows = {"jsonl": _json_rows, "tsv": _tsv_rows, "parquet": _parquet_rows, "hub": _hub_rows}[source_shard.kind](
        source_shard, fields
    )
    if fields.new_text_at:
        return _joined_rows(rows, fields, source_shard.names[0], fields.new_text_at)
    return _texts_of_rows(rows, fields, source_shard.names[0])


def _built_in(source: str) -> Iterator[SourceText]:
    if source == "stand_in":
        from replug.data.sources.stand_in_texts import stand_in_texts

        return stand_in_texts()
    from replug.data.sources.package_texts import read_package_texts

    return read_package_texts(source.removeprefix("package:"))


# Files of texts -----------------------------------------------------------------------------------------


def _texts_of_files(source_shard: SourceShard, fields: FieldMap) -> Iterator[tuple[int, Item | Passed]]:
    root = Path(source_shard.root) if source_shard.root else None
    for name in source_shard.names:
        path = Path(name)
        label = str(path.relative_to(root)) if root else path.name
        text = _file_text(path, fields)
        if isinstance(text, Rejected):
            yield 0, text
        elif fields.new_text_at:
            lines = ((number, {"text": line}) for number, line in enumerate(io.StringIO(text), start=1))
            yield from _joined_rows(lines, FieldMap(max_characters=fields.max_characters), name, fields.new_text_at)
        else:
            folder = Path(label).parts[0] if len(Path(label).parts) > 1 else "all"
            yield 0, _checked(SourceText(label, text, folder), fields, name, 0)


def _file_text(path: Path, fields: FieldMap) -> str | Rejected:
    try:
        content = path.read_bytes()
    except OSError as error:
        return Rejected(Reason.unreadable_file, str(path), 0, error.strerror or str(error))
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Rejected(Reason.not_utf8, str(path), 0, "UTF-16; convert or remove the file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Rejected(Reason.not_utf8, str(path), 0, f"at byte {error.start}; convert or remove the file")


# Rows ---------------------------------------------------------------------------------------------------


def _json_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    for line in _lines(source_shard):
        yield line if isinstance(line, Rejected | Passed) else _json_row(line, source_shard.names[0])


def _json_row(line: tuple[int, bytes], name: str) -> Row:
    number, content = line
    try:
        row = json.loads(content.decode("utf-8-sig"))  # Windows begins files with a byte order mark
    except UnicodeDecodeError as error:
        return Rejected(Reason.not_utf8, name, number, f"at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Rejected(Reason.invalid_json, name, number, f"not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        return Rejected(Reason.invalid_json, name, number, f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return Rejected(Reason.not_an_object, name, number, f"expected a JSON object, found {type(row).__name__}")
    return number, row


def _tsv_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    """Rows as of DPR's psgs_w100.tsv: a header, tabs, quotes doubled within quotes, a row on each line."""
    name = source_shard.names[0]
    header: list[str] | None = None
    if source_shard.start:  # the header is what it is to the source shard that begins the file
        lines = (
            line
            for line in _lines(SourceShard(0, "tsv", source_shard.names, 0))
            if not isinstance(line, Rejected | Passed)
        )
        header = next((cells for _, line in lines if (cells := _cells(line)) is not None), None)
    for line in _lines(source_shard):
        if isinstance(line, Rejected | Passed):
            yield line
            continue
        cells = _cells(line[1])
        if cells is None:
            yield Rejected(Reason.invalid_tsv, name, line[0], "not UTF-8, or a quote that does not end")
        elif header is None:
            header = cells
            yield Passed(line[0])
        elif len(cells) != len(header):
            yield Rejected(Reason.wrong_columns, name, line[0], f"{len(cells)} columns, the header has {len(header)}")
        else:
            yield line[0], dict(zip(header, cells, strict=True))


def _cells(line: bytes) -> list[str] | None:
    try:
        return next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")], delimiter="\t", strict=True))
    except (UnicodeDecodeError, csv.Error):
        return None


def _parquet_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    name = source_shard.names[0]
    number = 0
    try:
        file = pq.ParquetFile(name)
        groups = list(
            range(source_shard.start, file.num_row_groups if source_shard.stop is None else source_shard.stop)
        )
        tops = {path.split(".")[0] for path in (fields.text, fields.id, fields.domain)}
        columns = [column for column in file.schema_arrow.names if column in tops]
        for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        yield Rejected(Reason.damaged_file, name, number, f"no whole Parquet file: {str(error).splitlines()[0]}")


def _hub_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    """One shard of a dataset, streamed. Raises RunError where the hub breaks off: what is missing is no bad row."""
    name, number = source_shard.names[0], 0
    dataset = open_hub(name)
    try:
        for number, row in enumerate(dataset.shard(num_shards=dataset.num_shards, index=source_shard.start), start=1):
            yield number, row
    except (OSError, httpx.HTTPError) as error:
        raise RunError(
            f"data.source: {name} broke off after row {number} of shard {source_shard.start} ({error}); what is "
            "finished is kept: run the same command again"
        ) from error


def _lines(source_shard: SourceShard) -> Iterator[Line]:
    """The lines that begin within the source shard."""
    name = source_shard.names[0]
    number = 0
    try:
        with _open(Path(name)) as file:
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
                    yield Rejected(Reason.too_long, name, number, f"the line is longer than {MAX_LINE_BYTES} bytes")
                else:
                    yield (number, line) if line.strip() else Passed(number)
    except (EOFError, OSError, zlib.error, pa.ArrowInvalid) as error:
        yield Rejected(Reason.damaged_file, name, number, f"unreadable after this line: {error}")


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass


def _open(path: Path) -> Any:
    compression = file_kind(path)[1]
    if compression == "gzip":
        return gzip.open(path, "rb")
    if compression:
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), compression), 1 << 20)
    return path.open("rb")


# Texts out of rows --------------------------------------------------------------------------------------


def _texts_of_rows(rows: Iterator[Row], fields: FieldMap, name: str) -> Iterator[tuple[int, Item | Passed]]:
    for row in rows:
        if isinstance(row, Rejected | Passed):
            yield row.line, row
        else:
            yield row[0], _text_of_row(row[1], fields, name, row[0])


def _text_of_row(row: dict[str, Any], fields: FieldMap, name: str, line: int) -> Item:
    text, identifier, domain = (_nested(row, path) for path in (fields.text, fields.id, fields.domain))
    if text is None:
        there = ", ".join(map(str, row)) or "none"
        return Rejected(
            Reason.text_missing, name, line, f"field '{fields.text}' (data.text_field) is missing; the fields: {there}"
        )
    if not isinstance(text, str):
        return Rejected(
            Reason.text_not_a_string, name, line, f"field '{fields.text}' must be a string, found {_type(text)}"
        )
    if identifier == "":
        return Rejected(Reason.id_empty, name, line, f"field '{fields.id}' (data.id_field) is empty")
    if identifier is not None and (isinstance(identifier, bool) or not isinstance(identifier, str | int)):
        return Rejected(
            Reason.id_not_a_string,
            name,
            line,
            f"field '{fields.id}' must be a string or an integer, found {_type(identifier)}",
        )
    if domain is not None and (isinstance(domain, bool) or not isinstance(domain, str | int)):
        return Rejected(
            Reason.domain_not_a_string, name, line, f"field '{fields.domain}' must be a string, found {_type(domain)}"
        )
    domain = "all" if domain in (None, "") else str(domain)
    made = _unnamed(text, domain) if identifier is None else SourceText(str(identifier), text, domain)
    return _checked(made, fields, name, line)


def _type(value: Any) -> str:
    return type(value).__name__


def _unnamed(text: str, domain: str) -> SourceText:
    """A text that nobody named is called by its words, so that its split depends on no order of files."""
    return SourceText(content_hash(text.encode(errors="replace").decode()).hex(), text, domain, named=False)


def _checked(text: SourceText, fields: FieldMap, name: str, line: int) -> Item:
    if not text.text.strip():
        return Rejected(Reason.text_empty, name, line, "the text is empty")
    if len(text.text) > fields.max_characters:
        return Rejected(Reason.too_long, name, line, f"{len(text.text)} characters, more than data.max_text_characters")
    if "\0" in text.text:
        return Rejected(Reason.nul_character, name, line, "holds a NUL character: is it a text?")
    try:
        f"{text.id}{text.domain}{text.text}".encode()
    except UnicodeEncodeError:
        return Rejected(Reason.half_surrogate, name, line, "holds half a surrogate pair")
    return text


def _joined_rows(
    rows: Iterator[Row], fields: FieldMap, name: str, new_text_at: str
) -> Iterator[tuple[int, Item | Passed]]:
    """Rows that are lines of longer texts, as Wikitext's: a text begins where a line matches."""
    begins = re.compile(new_text_at)
    lines: list[str] = []
    first = 0
    for row in rows:
        if isinstance(row, Rejected | Passed):
            yield row.line, row
            continue
        yield row[0], Passed(row[0])
        line = _nested(row[1], fields.text)
        if not isinstance(line, str):
            yield row[0], _text_of_row(row[1], fields, name, row[0])
            continue
        if begins.search(line) and any(part.strip() for part in lines):
            yield first, _checked(_unnamed("".join(lines), "all"), fields, name, first)
            lines = []
        first = first if lines else row[0]
        lines.append(line if line.endswith("\n") else f"{line}\n")
    if any(part.strip() for part in lines):
        yield first, _checked(_unnamed("".join(lines), "all"), fields, name, first)


def _nested(row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
