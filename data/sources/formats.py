"""The one reader of rows: JSON Lines, JSON arrays, tables, Parquet and datasets of the hub.

`read_shard` yields each row with its number, from 1. An unreadable row gives `Rejected` with its reason, and a line
that is not a row (blank, or a table's header) gives None, so that all lines are counted. JSON Lines and tables with
tabs can be read in ranges of bytes, Parquet in ranges of row groups. A new format of rows is a function in `READERS`.
"""

import csv
import io
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HTTPError

from replug.config.errors import RunError, UserError
from replug.data.sources.records import (
    MAX_LINE_BYTES,
    UNREADABLE,
    Rejected,
    Row,
    SourceShard,
    first_bytes,
    format_of,
    open_file,
    other_format,
    packing_of,
    read_lines,
)

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 256
READ_CHARACTERS = 1 << 20  # of an array
TABLE_BYTES = 1 << 16  # enough for the first line of a table
TRAIN = "train"
TABS, SEPARATORS = "\t", ",;|"  # between the cells of a table; its kind is the separator
# MS MARCO's tables, passages or queries and documents, have no header, and their quotes are plain characters.
UNNAMED = {2: ("id", "text"), 4: ("id", "url", "title", "text")}
NUMBER_OF_MARCO = re.compile(r"D?\d+")
SPACE = re.compile(r"\s*")

Problem = tuple[str, str]  # reason of an unreadable row, in a word and in full; `read_shard` adds the place
Read = Iterator[tuple[int, dict[str, Any] | Problem | Rejected | None]]


def form_of(path: Path) -> str:
    """Return the reader of a file of rows by its first bytes, whatever its name.

    Raises UserError for a file that is missing or of a format without rows.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a file of rows, a folder of them or a dataset of the hub")
    kind = format_of(path)
    if (other := other_format(path)) == "Parquet" and packing_of(path) is None:
        return "parquet"
    if other or kind in ("HTML", "markup"):
        what = f"is, by its first bytes, {other}" if other else f"is {kind}"
        raise UserError(f"{path} {what}; expected JSON Lines, a JSON array, CSV, TSV or Parquet: convert it")
    if kind == "tsv":
        return TABS
    head = first_bytes(path, TABLE_BYTES).decode("utf-8-sig", errors="ignore").lstrip()
    if kind == "jsonl" or head[:1] in ("", "{", "["):
        return "array" if head.startswith("[") else "jsonl"
    first = head.partition("\n")[0]
    if TABS in first:
        return TABS
    separator = max(SEPARATORS, key=first.count)
    return separator if separator in first or kind == "CSV" else "jsonl"


def read_shard(source_shard: SourceShard, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a source shard with their numbers. Only Parquet heeds `columns`; None means all of them."""
    name, number = source_shard.names[0], 0
    try:
        for number, row in READERS[source_shard.kind](source_shard, columns):
            yield number, Rejected(row[0], name, number, row[1]) if isinstance(row, tuple) else row
    except UNREADABLE as error:
        yield number, Rejected("damaged_file", name, number, f"unreadable after this line: {error}")


def field_names(source_shard: SourceShard) -> list[str]:
    """Return the names of the fields that the first rows of a source shard have."""
    rows = itertools.islice(read_shard(source_shard), ROWS_AT_A_TIME)
    return list(dict.fromkeys(str(name) for _, row in rows if isinstance(row, dict) for name in row))


def count_rows_of(path: Path) -> int:
    """Count the rows of a file. Lines of JSON are not parsed. Raises UserError for a file that is damaged."""
    shard = SourceShard(form_of(path), (str(path),))
    rows: Iterator[tuple[int, Any]] = read_lines(shard) if shard.kind == "jsonl" else read_shard(shard, columns=())
    count = 0
    for number, row in rows:
        if isinstance(row, Rejected):
            raise UserError(f"{path}:{number}: {row.detail}")
        count += bool(row.strip() if isinstance(row, str) else row is not None)
    return count


# JSON -------------------------------------------------------------------------------------------------------


DECODER = json.JSONDecoder()


def _object_or_problem(row: Any) -> dict[str, Any] | Problem:
    if isinstance(row, dict):
        return row
    return "not_an_object", f"expected a JSON object, found {type(row).__name__}"


def _json_problem(error: ValueError | RecursionError) -> Problem:
    """Return the problem of a JSON text; extreme nesting raises RecursionError, extreme numbers other ValueErrors."""
    return "invalid_json", f"not valid JSON: {error}"


def _json_lines(source_shard: SourceShard, _: object) -> Read:
    for number, line in read_lines(source_shard):
        if isinstance(line, Rejected):
            yield number, line
            continue
        try:
            yield number, _object_or_problem(DECODER.decode(line)) if line.strip() else None
        except (ValueError, RecursionError) as error:
            yield number, _json_problem(error)


def _json_array(source_shard: SourceShard, _: object) -> Read:
    number = 0
    try:
        with io.TextIOWrapper(open_file(Path(source_shard.names[0])), encoding="utf-8-sig") as file:
            for number, row in enumerate(_array_values(file), start=1):
                yield number, _object_or_problem(row)
    except UnicodeDecodeError:
        yield number + 1, ("not_utf8", "not UTF-8; convert the file")
    except (ValueError, RecursionError) as error:
        yield number + 1, _json_problem(error)


def _array_values(file: TextIO) -> Iterator[Any]:
    """Yield the values of a JSON array, with at most the length of one row in memory."""
    text, place = file.read(READ_CHARACTERS).lstrip()[1:], 0
    while True:
        try:
            start = _skip_space(text, place)
            if text[start : start + 1] == "]":
                return
            value, end = DECODER.raw_decode(text, start)
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]") or end == len(text):
                raise json.JSONDecodeError("expected ',' or ']'", text, end)
        except json.JSONDecodeError as error:  # perhaps only cut off at the end of the part
            rest = text[place:]
            part = file.read(max(READ_CHARACTERS, len(rest))) if len(rest) <= MAX_LINE_BYTES else ""
            if not part:
                raise json.JSONDecodeError(error.msg, rest.strip(), 0) from error
            text, place = rest + part, 0
            continue
        yield value
        if text[end] == "]":
            return
        place = end + 1


def _skip_space(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match is not None, "it matches nothing too"
    return match.end()


# Tables -----------------------------------------------------------------------------------------------------


def _table_rows(source_shard: SourceShard, _: object) -> Read:
    """Yield the rows of a table by its header."""
    name, table = source_shard.names[0], replace(source_shard, start=0, stop=None)
    _, cells = _first_cells(table, has_quotes=False) if table.kind == TABS else (0, [])
    header_line, header = 0, UNNAMED.get(len(cells), ()) if cells and NUMBER_OF_MARCO.fullmatch(cells[0]) else ()
    has_quotes = not header
    if not header:
        header_line, cells = _first_cells(table, has_quotes=True)
        header = tuple(cell.strip() or f"unnamed {number}" for number, cell in enumerate(cells, start=1))
        if twice := next((column for column in header if header.count(column) > 1), None):
            raise UserError(f"{name}:{header_line}: two columns named {twice!r}; expected different names")
    for number, row in _cells(source_shard, has_quotes):
        if not isinstance(row, list):
            yield number, row
        elif number <= header_line and not source_shard.start:
            yield number, None
        elif len(row) != len(header):
            yield number, ("wrong_columns", f"{len(row)} columns, the header has {len(header)}")
        else:
            yield number, dict(zip(header, row, strict=True))


def _first_cells(table: SourceShard, has_quotes: bool) -> tuple[int, list[str]]:
    """Return the first row of a table and its line."""
    rows = ((number, cells) for number, cells in _cells(table, has_quotes) if isinstance(cells, list))
    return next(rows, (0, []))


def _cells(source_shard: SourceShard, has_quotes: bool) -> Iterator[tuple[int, list[str] | Problem | Rejected | None]]:
    """Yield the cells of each row with its first line; None for a blank line.

    Each line of a table with tabs is a row, as in DPR's psgs_w100.tsv. Quoted cells of other tables may have several
    lines. Quotes are doubled within quotes.
    """
    csv.field_size_limit(MAX_LINE_BYTES)  # 128 KB otherwise, less than a long text
    if source_shard.kind == TABS:
        for number, line in read_lines(source_shard):
            if isinstance(line, Rejected):
                yield number, line
                continue
            text = line.rstrip("\r\n") if line.strip() else ""
            quoted = csv.reader([text], delimiter=TABS, strict=True)
            yield number, _next_cells(quoted) if has_quotes or not text else text.split(TABS)
        return
    # Bytes that are not UTF-8 are read as surrogates: bad rows are skipped one by one.
    file = io.TextIOWrapper(open_file(Path(source_shard.names[0])), "utf-8-sig", errors="surrogateescape", newline="")
    with file:
        reader = csv.reader(file, delimiter=source_shard.kind, strict=True)
        number = 1
        while (cells := _next_cells(reader)) is not None or reader.line_num >= number:
            yield number, cells
            number = reader.line_num + 1


def _next_cells(reader: Any) -> list[str] | Problem | None:
    """Return the next cells of a `csv.reader`; None for a blank line and at the end."""
    try:
        cells = next(reader, None)
        "".join(cells or ()).encode()
    except csv.Error as error:
        form = "TSV" if reader.dialect.delimiter == TABS else "CSV"
        return "invalid_tsv", f"not valid {form} ({error}); expected a row on each line, quotes doubled"
    except UnicodeEncodeError:
        return "not_utf8", "not UTF-8; convert the file"
    return cells or None


# Parquet ----------------------------------------------------------------------------------------------------


def _parquet_rows(source_shard: SourceShard, columns: Collection[str] | None) -> Read:
    number = 0
    try:
        with pq.ParquetFile(source_shard.names[0]) as file:
            stop = file.num_row_groups if source_shard.stop is None else source_shard.stop
            groups, wanted = range(source_shard.start, stop), None if columns is None else list(columns)
            for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=list(groups), columns=wanted):
                for row in batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows:
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last two: values beyond their type
        yield number, ("damaged_file", f"no whole Parquet file: {str(error).splitlines()[0]}")


# Datasets of the hub ----------------------------------------------------------------------------------------


def plan_hub(name: str) -> Iterator[SourceShard]:
    """Yield the shards of a split of a dataset, which are streamed.

    A dataset is written NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT, such as
    Salesforce/wikitext:wikitext-103-raw-v1:test, or NAME::SPLIT if it has one configuration. Without a split it is
    `train`; evaluations read `test` (`named_split`).
    """
    for shard in range(_open_hub(name).num_shards):
        yield SourceShard("hub", (name,), shard)


def _hub_rows(source_shard: SourceShard, _: object) -> Read:
    """Yield the rows of a hub data set. Raises RunError if the hub breaks off: missing rows are not rejected rows."""
    name, number = source_shard.names[0], 0
    dataset = _open_hub(name)
    try:
        for number, row in enumerate(dataset.shard(num_shards=dataset.num_shards, index=source_shard.start), start=1):
            yield number, row
    except (OSError, HTTPError) as error:
        raise RunError(
            f"{name} broke off after row {number} of shard {source_shard.start} ({error}); "
            "finished work is kept: run the same command again"
        ) from error


def named_split(name: str, split: str) -> str:
    """Return the name with this split, unless it has one."""
    dataset, _, rest = name.partition(":")
    configuration, _, own = rest.partition(":")
    return f"{dataset}:{configuration}:{own or split}"


def _open_hub(name: str):  # type: ignore[no-untyped-def]
    """Stream a split."""
    from datasets import load_dataset

    path, configuration, split = named_split(name, TRAIN).split(":", 2)
    try:
        splits = load_dataset(path, configuration or None, streaming=True)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"no file or folder {name} is here, and the hub's dataset cannot be opened: {reason}"
        ) from error
    if split not in splits:
        raise UserError(
            f"{name} has no split {split!r}; expected one of {', '.join(map(str, splits))}, such as "
            f"{path}:{configuration}:{next(iter(splits))}"
        )
    return splits[split]


READERS: dict[str, Callable[[SourceShard, Collection[str] | None], Read]] = {
    "parquet": _parquet_rows,
    "jsonl": _json_lines,
    "array": _json_array,
    "hub": _hub_rows,
    **dict.fromkeys((TABS, *SEPARATORS), _table_rows),
}
