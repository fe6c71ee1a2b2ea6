"""The one reader of rows: JSON Lines, JSON arrays, tables, Parquet and datasets of the hub.

A reader yields each row with its number, from 1. A row that cannot be read comes as `Rejected` with its reason, and a
line that is not a row (blank, or a table's header) as None, so that all lines are counted. JSON Lines and tables with
tabs can be read in ranges of bytes, Parquet in ranges of row groups. A new format of rows is a function in `READERS`.
"""

import csv
import io
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HTTPError

from replug.config.errors import RunError, UserError
from replug.data.sources.lines import (
    DECODER,
    EXCERPT,
    MAX_LINE_BYTES,
    UNREADABLE,
    format_of,
    json_object,
    open_file,
    other_format,
    packing_of,
    read_lines,
    twice,
)
from replug.data.sources.records import Reason, Rejected, Row, SourceShard

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 256
READ_CHARACTERS = 1 << 20  # of an array
HEAD_BYTES = 1 << 16
TRAIN = "train"
TABS, SEPARATORS = "\t", ",;|"  # between the cells of a table; its kind is the separator
HINT = "sep="  # Excel's, before the header
SEPARATOR_HINT = re.compile(rf"{HINT}([,;|\t])")
# MS MARCO's tables have no header, and quotes that mean nothing: passages or queries, and documents.
UNNAMED = {2: ("id", "text"), 4: ("id", "url", "title", "text")}
NUMBER_OF_MARCO = re.compile(r"D?\d+")
SPACE = re.compile(r"\s*")


def form_of(path: Path) -> str:
    """Return the reader of a file of rows by its first bytes, whatever it is called.

    Raises UserError for a file that is missing or of a format without rows.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a file of rows, a folder of them or a dataset of the hub")
    if (other := other_format(path)) == "Parquet" and packing_of(path) is None:
        return "parquet"
    if other or format_of(path) in ("HTML", "markup"):
        what = f"is, by its first bytes, {other}" if other else f"is {format_of(path)}"
        raise UserError(f"{path} {what}; expected JSON Lines, a JSON array, CSV, TSV or Parquet: convert it")
    try:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES).decode("utf-8-sig", errors="ignore").lstrip()
    except UNREADABLE:  # reading the rows says what is wrong with it
        return "jsonl"
    if head[:1] in ("", "{", "["):
        return "array" if head.startswith("[") else "jsonl"
    first = head.partition("\n")[0]
    if hint := SEPARATOR_HINT.fullmatch(first.rstrip("\r")):
        return hint[1]
    if TABS in first or format_of(path) == "tsv":
        return TABS
    separator = max(SEPARATORS, key=first.count)
    return separator if separator in first or format_of(path) == "CSV" else "jsonl"


def read_shard(source_shard: SourceShard, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a source shard with their numbers. Only Parquet heeds `columns`; None means all of them."""
    if source_shard.kind == "parquet":
        return _parquet_rows(source_shard, columns)
    return READERS[source_shard.kind](source_shard)


def field_names(source_shard: SourceShard) -> list[str]:
    """Return the names of the fields that the first rows of a source shard have."""
    if source_shard.kind == "parquet":
        return _column_names(source_shard.names[0])
    rows = itertools.islice(read_shard(source_shard), ROWS_AT_A_TIME)
    return list(dict.fromkeys(str(name) for _, row in rows if isinstance(row, dict) for name in row))


def count_rows_of(path: Path) -> int:
    """Count the rows of a file. Lines of JSON are not parsed. Raises UserError for a file that is damaged."""
    shard = SourceShard(form_of(path), (str(path),))
    if shard.kind == "parquet":
        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: {_damage(error)}") from error
    rows: Iterator[tuple[int, Any]] = read_lines(shard) if shard.kind == "jsonl" else read_shard(shard)
    count = 0
    for number, row in rows:
        if isinstance(row, Rejected):
            raise UserError(f"{path}:{number}: {row.detail}")
        count += bool(row.strip() if isinstance(row, bytes) else row is not None)
    return count


# JSON -------------------------------------------------------------------------------------------------------


def _json_lines(source_shard: SourceShard) -> Iterator[Row]:
    name = source_shard.names[0]
    for number, line in read_lines(source_shard):
        if isinstance(line, Rejected):
            yield number, line
        elif not line.strip():
            yield number, None
        else:
            row = json_object(line)
            yield number, Rejected(row[0], name, number, row[1]) if isinstance(row, tuple) else row


def _json_array(source_shard: SourceShard) -> Iterator[Row]:
    name, number = source_shard.names[0], 0
    try:
        with io.TextIOWrapper(open_file(Path(name)), encoding="utf-8-sig") as file:
            for number, row in enumerate(_array_values(file), start=1):
                detail = f"expected a JSON object, found {type(row).__name__}"
                yield number, row if isinstance(row, dict) else Rejected(Reason.not_an_object, name, number, detail)
    except UnicodeDecodeError:
        yield number + 1, Rejected(Reason.not_utf8, name, number + 1, "not UTF-8; convert the file")
    except UNREADABLE as error:
        yield number + 1, Rejected(Reason.damaged_file, name, number + 1, f"the file is damaged: {error}")
    except (ValueError, RecursionError) as error:  # of JSON, a field twice, a number of thousands of digits
        at = f"{error.msg} of {error.doc[:EXCERPT]!r}" if isinstance(error, json.JSONDecodeError) else error
        yield number + 1, Rejected(Reason.invalid_json, name, number + 1, f"not valid JSON: {at}")


def _array_values(file: TextIO) -> Iterator[Any]:
    """Yield the values of a JSON array; no more of it than a row may have is in memory."""
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
        except json.JSONDecodeError as error:  # it may only be cut where the part that was read ends
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


def _table_rows(source_shard: SourceShard) -> Iterator[Row]:
    """Yield the rows of a table by its header. Spreadsheets write `sep=;` before it, and empty cells behind it."""
    name = source_shard.names[0]
    header, has_quotes = _unnamed(source_shard), True
    if header is not None:
        has_quotes = False
    elif source_shard.start:  # the first source shard passes the header over as a line
        beginning = _cells(replace(source_shard, start=0, stop=None), has_quotes)
        rows = (cells for _, cells in beginning if isinstance(cells, list))
        header = next((_names(cells) for cells in rows if not cells[0].startswith(HINT)), None)
    for number, cells in _cells(source_shard, has_quotes):
        if not isinstance(cells, list):
            yield number, cells
        elif header is None:
            header = None if cells[0].startswith(HINT) else _names(cells)
            if header and (again := twice(filter(None, header))) is not None:
                raise UserError(
                    f"{name}:{number}: the header has two columns named {again!r}; expected different names"
                )
            if header and not header[0]:  # pandas writes its index so
                log.warning(f"{name}: the first column has no name, so it is taken for row numbers and not read")
            yield number, None
        else:
            yield number, _row_of(header, cells, name, number)


def _unnamed(source_shard: SourceShard) -> Sequence[str] | None:
    """Return the columns of MS MARCO's tables, which have no header; None for other tables."""
    if source_shard.kind != TABS:
        return None
    lines = read_lines(replace(source_shard, start=0, stop=None))
    first = next((line for _, line in lines if isinstance(line, bytes) and line.strip()), b"")
    cells = first.decode("utf-8-sig", errors="replace").rstrip("\r\n").split(TABS)
    return UNNAMED.get(len(cells)) if NUMBER_OF_MARCO.fullmatch(cells[0]) else None


def _names(cells: list[str]) -> list[str]:
    return [cell.strip() for cell in cells]


def _row_of(header: Sequence[str], cells: list[str], name: str, number: int) -> dict[str, Any] | Rejected:
    if len(cells) > len(header) and not any(cells[len(header) :]):
        cells = cells[: len(header)]
    if len(cells) != len(header):
        return Rejected(Reason.wrong_columns, name, number, f"{len(cells)} columns, the header has {len(header)}")
    pairs = list(zip(header, cells, strict=True))
    if unnamed := [cell for column, cell in pairs[1:] if cell and not column]:  # the first may be pandas' index
        detail = f"a column without a name holds {unnamed[0][:EXCERPT]!r}; expected a name in the header"
        return Rejected(Reason.wrong_columns, name, number, detail)
    return {column: cell for column, cell in pairs if column}


def _cells(source_shard: SourceShard, has_quotes: bool) -> Iterator[tuple[int, list[str] | Rejected | None]]:
    """Yield the cells of each row with its first line; None for a blank line."""
    csv.field_size_limit(MAX_LINE_BYTES)  # 128 KB otherwise, less than a long text
    name = source_shard.names[0]
    rows = _cells_of_lines(source_shard, has_quotes) if source_shard.kind == TABS else _cells_of_csv(source_shard)
    for number, cells in rows:
        if isinstance(cells, csv.Error):
            form = "TSV" if source_shard.kind == TABS else "CSV"
            detail = f"not valid {form} ({cells}); expected a row on each line, quotes doubled"
            yield number, Rejected(Reason.invalid_tsv, name, number, detail)
        else:
            yield number, cells or None


def _cells_of_lines(
    source_shard: SourceShard, has_quotes: bool
) -> Iterator[tuple[int, list[str] | Rejected | csv.Error | None]]:
    """Yield the cells of a table with tabs as DPR's psgs_w100.tsv: each line a row, quotes doubled within quotes."""
    for number, line in read_lines(source_shard):
        if isinstance(line, Rejected) or not line.strip():
            yield number, line if isinstance(line, Rejected) else None
            continue
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
            yield number, next(csv.reader([text], delimiter=TABS, strict=True)) if has_quotes else text.split(TABS)
        except UnicodeDecodeError as error:
            detail = f"not UTF-8 at byte {error.start} of the line; convert the file"
            yield number, Rejected(Reason.not_utf8, source_shard.names[0], number, detail)
        except csv.Error as error:
            yield number, error


def _cells_of_csv(source_shard: SourceShard) -> Iterator[tuple[int, list[str] | Rejected | csv.Error]]:
    """Yield the cells of a table; cells in quotes may have several lines, and bad rows are skipped one by one."""
    name, number = source_shard.names[0], 0
    try:
        with io.TextIOWrapper(
            open_file(Path(name)), encoding="utf-8-sig", errors="surrogateescape", newline=""
        ) as file:
            reader = csv.reader(file, delimiter=source_shard.kind, strict=True)
            while True:
                number = reader.line_num + 1
                try:
                    cells = next(reader)
                    "".join(cells).encode()
                    yield number, cells
                except StopIteration:
                    return
                except csv.Error as error:
                    yield number, error
                except UnicodeEncodeError:  # bytes that are not UTF-8 were read as surrogates
                    yield number, Rejected(Reason.not_utf8, name, number, "not UTF-8; convert the file")
    except UNREADABLE as error:
        yield number, Rejected(Reason.damaged_file, name, number, f"unreadable after this line: {error}")


# Parquet ----------------------------------------------------------------------------------------------------


def _parquet_rows(source_shard: SourceShard, columns: Collection[str] | None) -> Iterator[Row]:
    name, number = source_shard.names[0], 0
    outermost = None if columns is None else {column.partition(".")[0] for column in columns}
    read = [column for column in _column_names(name) if outermost is None or column in outermost]
    if (again := twice(read)) is not None:
        raise UserError(f"{name} has two columns named {again!r}; expected different names")
    try:
        with pq.ParquetFile(name) as file:
            stop = file.num_row_groups if source_shard.stop is None else source_shard.stop
            groups = range(source_shard.start, stop)
            wanted = None if columns is None else list(columns)
            for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=list(groups), columns=wanted):
                for row in batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows:
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last two of values beyond their type
        yield number, Rejected(Reason.damaged_file, name, number, _damage(error))


def _column_names(name: str) -> list[str]:
    try:
        return list(pq.read_schema(name).names)
    except (pa.ArrowException, OSError):  # reading the rows says what is wrong with it
        return []


def _damage(error: Exception) -> str:
    return f"no whole Parquet file: {str(error).splitlines()[0]}"


# Datasets of the hub ----------------------------------------------------------------------------------------


def plan_hub(name: str) -> Iterator[SourceShard]:
    """Yield the shards of a split of a dataset, which are streamed.

    A dataset is written NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT, such as
    Salesforce/wikitext:wikitext-103-raw-v1:test, or NAME::SPLIT if it has one configuration. Without a split it is
    `train`; evaluations read `test` (`named_split`).
    """
    for shard in range(_open_hub(name).num_shards):
        yield SourceShard("hub", (name,), shard)


def _hub_rows(source_shard: SourceShard) -> Iterator[Row]:
    """Yield the rows of a hub data set. Raises RunError if the hub breaks off, since missing rows are not bad rows."""
    name, number = source_shard.names[0], 0
    dataset = _open_hub(name)
    try:
        for number, row in enumerate(dataset.shard(num_shards=dataset.num_shards, index=source_shard.start), start=1):
            yield number, row
    except (OSError, HTTPError) as error:
        raise RunError(
            f"data.source: {name} broke off after row {number} of shard {source_shard.start} ({error}); what is "
            "finished is kept: run the same command again"
        ) from error


def named_split(name: str, split: str) -> str:
    """Return the name with this split, where it says none."""
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
            f"data.source: no file or folder {name} is here, and the hub's dataset cannot be opened: {reason}"
        ) from error
    if split not in splits:
        raise UserError(
            f"data.source: {name} has no split {split!r}; expected one of {', '.join(map(str, splits))}, such as "
            f"{path}:{configuration}:{next(iter(splits))}"
        )
    return splits[split]


READERS: dict[str, Callable[[SourceShard], Iterator[Row]]] = {
    "jsonl": _json_lines,
    "array": _json_array,
    "hub": _hub_rows,
    **dict.fromkeys((TABS, *SEPARATORS), _table_rows),
}
