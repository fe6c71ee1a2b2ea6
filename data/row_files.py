"""Rows where they are: a file, a folder, a pattern with `*` or a dataset of the hub, as dicts with their places.

A file's first bytes say what it is, whatever it is called: gzip, zstd or bzip2 around JSON Lines, a JSON array, CSV or
a table with tabs, or Parquet. A few rows are in memory at a time. A folder of BEIR has a corpus and queries by split.
`replug.data.shapes` says what rows of known data sets mean.
"""

import csv
import hashlib
import io
import json
import logging
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from itertools import pairwise
from pathlib import Path
from token import ENDMARKER, NEWLINE, NL, STRING
from tokenize import TokenError, generate_tokens
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from replug.config.errors import UserError
from replug.data.judgements import read_qrels
from replug.data.sources import shards
from replug.data.sources.formats import ROWS, ROWS_AT_A_TIME, format_of, plan_hub
from replug.data.sources.lines import (
    DECODER,
    EXCERPT,
    MAX_LINE_BYTES,
    UNREADABLE,
    json_object,
    open_file,
    other_format,
    packing_of,
    read_lines,
    twice,
)
from replug.data.sources.records import FieldMap, Rejected, SourceShard
from replug.data.sources.row_texts import names_in, nested

log = logging.getLogger(__name__)

PlacedRow = tuple[str, dict[str, Any]]  # `file:line`, or `file, row N`, and its fields

CORPUS, TRAIN, DEV, TEST = "corpus", "train", "dev", "test"  # parts of a folder of BEIR
QUERIES = "queries"
SPLIT_OF_BEIR = {"corpus": CORPUS, "train": TRAIN, "dev": DEV, "heldout": TEST}  # by the key of `data`
FILES_OF_ROWS = ("jsonl", "json", "tsv", "parquet", "CSV")
HEAD_BYTES, READ_CHARACTERS = 1 << 16, 1 << 20
# MS MARCO's tables have no header, and quotes that mean nothing: passages or queries, and documents.
UNNAMED = {2: ("id", "text"), 4: ("id", "url", "title", "text")}
NUMBER_OF_MARCO = re.compile(r"D?\d+")
# Fields that a cell of a table may hold as a list.
LISTS = ("answers", "answer", "golden_answers", "possible_answers", "gold", "candidates", "pos", "neg")
BETWEEN_TOKENS = (NL, NEWLINE, ENDMARKER)
SPACE = re.compile(r"\s*")
SEPARATOR_HINT = re.compile(r"sep=([,;|\t])")  # Excel's


def read_rows(source: str | Path, fields: Mapping[str, str] | None = None, part: str = CORPUS) -> Iterator[PlacedRow]:
    """Yield the rows of a source in order. `fields` renames fields (`data.fields`), and dots reach into nested ones.

    `part` is what is read of a folder of BEIR. Raises UserError for a row or file that is damaged, with its place.
    """
    files = row_files(source, part)
    rows = _hub_rows(str(source)) if files is None else (placed for path in files for placed in _file_rows(path))
    for where, row in rows:
        yield where, _renamed(row, fields) if fields else row


def row_files(source: str | Path, part: str = CORPUS) -> list[Path] | None:
    """Return the files whose rows are read, in order; None for a dataset of the hub."""
    if (folder := beir_folder(source)) is not None:
        return [_beir_file(folder, CORPUS if part == CORPUS else QUERIES)]
    try:
        paths = shards.files_of(str(source))
    except UserError as error:
        raise UserError(str(error).removeprefix("data.source: ")) from error
    if paths is None or len(paths) == 1 or Path(source).expanduser().is_file():
        return paths
    read = [path for path in paths if format_of(path) in FILES_OF_ROWS]
    if not read:
        raise UserError(f"{source} holds no file of rows; expected JSON Lines, a JSON array, CSV, TSV or Parquet")
    log.info(f"{source}: the rows of {len(read):,} files are read, from {read[0].name} to {read[-1].name}")
    return read


def beir_folder(source: str | Path) -> Path | None:
    """Return the folder if the source is one of BEIR: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`."""
    folder = Path(source).expanduser()
    has_both = folder.is_dir() and all(list(folder.glob(f"{name}.jsonl*")) for name in (CORPUS, QUERIES))
    return folder if has_both else None


def qrels_file(folder: Path, split: str) -> Path:
    """Return the judgements of a split of a BEIR folder. Raises UserError if it has none."""
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in folder.glob("qrels/*.tsv"))) or "none"
        raise UserError(f"{path} does not exist; {folder} has the splits {there}")
    return path


def _beir_file(folder: Path, name: str) -> Path:
    return sorted(folder.glob(f"{name}.jsonl*"))[0]


def rows_sha256(source: str | Path, part: str = CORPUS) -> str:
    """Return a hash of the rows' files; of a dataset of the hub, of its name."""
    files = row_files(source, part)
    if files is None:
        return hashlib.sha256(f"hub: {source}".encode()).hexdigest()
    if part != CORPUS and (folder := beir_folder(source)) is not None:
        files = [*files, qrels_file(folder, part)]
    sums = [shards.content_sha256(path) for path in files]
    return sums[0] if len(sums) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest()


def count_rows(source: str | Path, part: str = CORPUS) -> int:
    """Count the rows of files; fields are not read where lines are rows. Raises UserError for a dataset of the hub."""
    if part != CORPUS and (folder := beir_folder(source)) is not None:
        return len(read_qrels(qrels_file(folder, part)))
    files = row_files(source, part)
    if files is None:
        raise UserError(f"{source} is a dataset of the hub, whose rows are not counted here; give --documents N")
    return sum(_count(path) for path in files)


def _count(path: Path) -> int:
    if (form := _form_of(path)) == "jsonl":
        return sum(1 for _ in _lines(path))
    if form == "parquet":
        return int(_parquet_file(path).metadata.num_rows)
    return sum(1 for _ in _file_rows(path))


def _renamed(row: dict[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the row under other names; a field that is named so already gives way."""
    values = ((new, row[old] if old in row else nested(row, old)) for old, new in fields.items())
    found = {new: value for new, value in values if value is not None}
    return {**{name: value for name, value in row.items() if name not in fields}, **found}


# Files ----------------------------------------------------------------------------------------------------


def _file_rows(path: Path) -> Iterator[PlacedRow]:
    form = _form_of(path)
    if form == "jsonl":
        return _json_lines(path)
    if form == "array":
        return _json_array(path)
    if form == "parquet":
        return _parquet_rows(path)
    return _tsv_rows(path) if form == "\t" else _csv_rows(path, form)


def _form_of(path: Path) -> str:
    """Return jsonl, array, parquet, or what separates the cells of a table. Raises UserError for other formats."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a file of rows, a folder of them or a dataset of the hub")
    if (found := other_format(path)) == "Parquet" and packing_of(path) is None:
        return "parquet"
    if found or format_of(path) in ("HTML", "markup"):
        what = f"is, by its first bytes, {found}" if found else f"is {format_of(path)}"
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
    if "\t" in first or format_of(path) == "tsv":
        return "\t"
    separator = max(",;|", key=first.count)
    return separator if separator in first or format_of(path) == "CSV" else "jsonl"


def _json_lines(path: Path) -> Iterator[PlacedRow]:
    for where, line in _lines(path):
        row = json_object(line)
        if isinstance(row, tuple):
            raise UserError(f"{where}: {row[1]}")
        if b"\\ud" in line.lower():
            _require_whole_characters(row, where)
        yield where, row


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    for number, line in read_lines(SourceShard("jsonl", (str(path),))):
        if isinstance(line, Rejected):
            raise UserError(f"{path}:{number}: {line.detail}")
        if line is not None:
            yield f"{path}:{number}", line


def _json_array(path: Path) -> Iterator[PlacedRow]:
    """Yield the objects of an array; no more of it than a row may have is in memory."""
    number = 0
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig") as file:
            text, place = file.read(READ_CHARACTERS).lstrip()[1:], 0
            while True:
                try:
                    row, end, follows = _next_of_array(text, place)
                except json.JSONDecodeError as error:  # it may only be cut where the part that was read ends
                    rest = text[place:]
                    part = file.read(max(READ_CHARACTERS, len(rest))) if len(rest) <= MAX_LINE_BYTES else ""
                    if not part:
                        begins = rest.strip()[:EXCERPT]
                        raise UserError(
                            f"{path}, row {number + 1}: not valid JSON: {error.msg} of {begins!r}"
                        ) from error
                    text, place = rest + part, 0
                    continue
                if row is not None:
                    number += 1
                    where = f"{path}, row {number}"
                    if not isinstance(row, dict):
                        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
                    _require_whole_characters(row, where)
                    yield where, row
                if follows == "]":
                    return
                place = end
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {number + 1}: not UTF-8; convert the file") from error
    except UNREADABLE as error:
        raise UserError(f"{path}, row {number + 1}: the file is damaged: {error}") from error
    except (ValueError, RecursionError) as error:  # a field twice, a number of thousands of digits
        raise UserError(f"{path}, row {number + 1}: not valid JSON: {error}") from error


def _next_of_array(text: str, place: int) -> tuple[Any, int, str]:
    """Return a value, where the next one begins, and the comma or bracket between; None before the last bracket."""
    start = _skip_space(text, place)
    if text[start : start + 1] == "]":
        return None, start + 1, "]"
    value, end = DECODER.raw_decode(text, start)
    end = _skip_space(text, end)
    follows = text[end : end + 1]
    if follows not in (",", "]") or not follows:
        raise json.JSONDecodeError("expected ',' or ']'", text, end)
    return value, end + 1, follows


def _skip_space(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match is not None, "it matches nothing too"
    return match.end()


def _csv_rows(path: Path, separator: str) -> Iterator[PlacedRow]:
    """Yield the rows of a table by its header; a cell in quotes may have several lines.

    Spreadsheets write `sep=;` before it, and empty cells behind it.
    """
    reader, header, line = None, list[str](), 0
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            while (cells := _next_cells(reader)) is not None:
                if cells and not header:
                    header = [] if cells[0].startswith("sep=") else _header(cells, path)
                elif cells:
                    yield f"{path}:{line + 1}", _of_header(header, cells, f"{path}:{line + 1}")
                line = reader.line_num
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{line + 1}: not UTF-8; convert the file") from error
    except csv.Error as error:
        raise UserError(f"{path}:{line + 1}: not valid CSV ({error}); expected quotes doubled within quotes") from error
    except UNREADABLE as error:
        raise UserError(f"{path}:{line + 1}: unreadable after this line: {error}") from error


def _next_cells(reader: Any) -> list[str] | None:
    limit = csv.field_size_limit(MAX_LINE_BYTES)  # 128 KB otherwise, less than a long text; it is the process's
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(limit)


def _tsv_rows(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a table with tabs: as DPR's psgs_w100.tsv by its header, or MS MARCO's without one."""
    first = next((_cells(*line) for line in _lines(path)), [])
    if first and NUMBER_OF_MARCO.fullmatch(first[0]) and (names := UNNAMED.get(len(first))):
        for where, line in _lines(path):
            yield where, _of_header(names, _cells(where, line), where)
        return
    for number, row in ROWS["tsv"](SourceShard("tsv", (str(path),)), FieldMap()):
        if isinstance(row, Rejected):
            raise UserError(f"{path}:{number}: {row.detail}")
        if row is not None:
            yield f"{path}:{number}", _with_lists(row)


def _cells(where: str, line: bytes) -> list[str]:
    try:
        return line.decode("utf-8-sig").rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file") from error


def _header(cells: list[str], path: Path) -> list[str]:
    names = [cell.strip() for cell in cells]
    if (again := twice(filter(None, names))) is not None:
        raise UserError(f"{path}: the header has two columns named {again!r}; expected different names")
    if names and not names[0]:
        log.warning(f"{path}: the first column has no name, so it is taken for the numbers of rows and not read")
    return names


def _of_header(header: Sequence[str], cells: list[str], where: str) -> dict[str, Any]:
    if len(cells) > len(header) and not any(cells[len(header) :]):
        cells = cells[: len(header)]
    if len(cells) != len(header):
        raise UserError(f"{where}: {len(cells)} columns, but {len(header)} are expected: {names_in(header)}")
    if unnamed := [cell for name, cell in list(zip(header, cells, strict=True))[1:] if cell and not name]:
        raise UserError(
            f"{where}: a column without a name holds {unnamed[0][:EXCERPT]!r}; expected a name in the header"
        )
    return _with_lists({name: cell for name, cell in zip(header, cells, strict=True) if name})


def _with_lists(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without its empty cells, and lists as lists."""
    return {name: list_in(cell) if name in LISTS else cell for name, cell in row.items() if cell != ""}


def list_in(cell: str) -> Any:
    """Return the list that a text holds as JSON, Python or numpy write it; the text as it is where it holds none.

    numpy and pandas write `['a' 'b']` without commas, which Python would read as one text.
    """
    if not (cell.startswith("[") and cell.endswith("]")):
        return cell
    with suppress(ValueError):  # first, since Python reads JSON's pairs of surrogates as two characters
        return json.loads(cell)
    try:
        tokens = [token for token in generate_tokens(StringIO(cell).readline) if token.type not in BETWEEN_TOKENS]
        texts = [token for token in tokens if token.type == STRING]
        are_apart = all(before.end != after.start for before, after in pairwise(texts))
        if len(texts) == len(tokens) - 2 and are_apart:  # nothing but texts between the brackets
            return [literal_eval(token.string) for token in texts]
        return literal_eval(cell)
    except (ValueError, SyntaxError, TokenError):
        return cell


def _parquet_file(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole Parquet file: {str(error).splitlines()[0]}") from error


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
    file, number = _parquet_file(path), 0
    _header(file.schema_arrow.names, path)
    try:
        for batch in file.iter_batches(ROWS_AT_A_TIME):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged after row {number}: {str(error).splitlines()[0]}") from error


def _hub_rows(name: str) -> Iterator[PlacedRow]:
    number = 0
    try:
        for part in plan_hub(name):
            for _, row in ROWS["hub"](part, FieldMap()):
                number += 1
                assert isinstance(row, dict), "a dataset's rows are dicts"
                yield f"{name}, row {number}", row
    except UserError as error:
        raise UserError(str(error).removeprefix("data.source: ")) from error


def _require_whole_characters(row: dict[str, Any], where: str) -> None:
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: field {name!r} holds half a surrogate pair") from error
