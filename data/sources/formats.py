"""The formats of sources: how each is divided into source shards, and read.

Tables and JSON Lines are read in ranges of bytes, or whole where they are compressed. A file of a tree of texts holds
one text, or many with `data.new_text_at`. A text is called by its path below the tree's root; the first folder of that
path is its domain. No more of a file is in memory than one text may have. A new format of rows is a function in `ROWS`.
"""

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HTTPError

from replug.config.errors import RunError, UserError
from replug.data.sources.built_in_texts import read_package_texts, stand_in_texts
from replug.data.sources.lines import (
    COMPRESSED,
    UNREADABLE,
    byte_ranges,
    json_object,
    open_file,
    other_format,
    read_lines,
    skip_line,
    table_cells,
    twice,
)
from replug.data.sources.markup import MainTexts, main_texts, plain_markup
from replug.data.sources.records import FieldMap, Item, Reason, Rejected, Row, SourceShard, SourceText, readable_name
from replug.data.sources.row_texts import checked_text, joined_texts, names_in, nested, texts_of_rows

PACKAGE = "package:"
ROWS_AT_A_TIME = 256
BATCH_BYTES = 1 << 28
BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8
READ_BYTES = 1 << 20
TRAIN = "train"


def format_of(path: Path) -> str | None:
    """Return the format of a file by its suffix, of a compressed one by the suffix before; None if it is not known."""
    suffix = unpacked_suffix(path)
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def unpacked_suffix(path: Path) -> str:
    """Return a file's suffix in lower case, of a compressed one the suffix before."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def rows_problem(path: Path, fields: FieldMap) -> str | None:
    """Return why a file holds no rows, None if it does.

    Tables and JSON Lines are judged by their suffix: what is wrong with a row is said where it is read. A `.json` file
    holds rows if one of its first lines is one, a text or a file without a suffix, such as Spark's, if its first is.
    """
    kind = format_of(path)
    if kind in ROWS:
        return None
    if kind in ("markup", "HTML"):
        return f"is {kind}"
    lines = (line for _, line in read_lines(SourceShard("jsonl", (str(path),))) if isinstance(line, bytes))
    rows = [json_object(line) for line in itertools.islice(lines, ROWS_AT_A_TIME if kind == "json" else 1)]
    if any(isinstance(row, dict) and nested(row, fields.text) is not None for row in rows):
        return None
    if kind != "json":
        return f"is {kind or 'of no known format'}; expected JSON Lines, TSV or Parquet"
    first = rows[0] if rows else {}
    found = f"has the fields {names_in(first)}" if isinstance(first, dict) else f"is none ({first[1]})"
    return f"holds no rows: the first {found}; expected on each line an object with '{fields.text}' (data.fields)"


def plan_file(path: Path, shard_bytes: int | None, is_rows: bool = True) -> Iterable[SourceShard]:
    """Return the source shards of a file, about `shard_bytes` each. None means one, since texts run over many rows.

    Raises UserError for a file whose first bytes are those of another format.
    """
    kind = format_of(path) or "jsonl"
    if kind in PROSE and not is_rows:
        return [SourceShard("text", (str(path),))]
    kind = "jsonl" if kind == "text" else kind
    if (found := other_format(path)) and found.lower() != kind:
        raise UserError(f"data.source: {path} is, by its first bytes, {found}; expected {EXPECTED[kind]}")
    if kind == "parquet":
        return _plan_parquet(str(path), shard_bytes)
    return byte_ranges("tsv" if kind == "tsv" else "jsonl", str(path), shard_bytes)


def field_names(source_shard: SourceShard) -> list[str]:
    """Return the names of the fields that the first rows of a source shard have, read or not."""
    if source_shard.kind == "parquet":
        return _column_names(source_shard.names[0])
    rows = itertools.islice(ROWS[source_shard.kind](source_shard, FieldMap()), ROWS_AT_A_TIME)
    return list(dict.fromkeys(str(name) for _, row in rows if isinstance(row, dict) for name in row))


def read_items(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    """Yield the texts of a source shard with their lines.

    What cannot be read comes with its reason. Lines that are not rows come as None, so that all can be counted.
    """
    name = source_shard.names[0]
    if source_shard.kind in ROWS:
        yield from texts_of_rows(ROWS[source_shard.kind](source_shard, fields), fields, name)
    elif source_shard.kind == "text":
        yield from _read_text(source_shard, fields)
    else:
        texts = stand_in_texts() if name == "stand_in" else read_package_texts(name.removeprefix(PACKAGE))
        yield from enumerate(texts, start=1)


def is_built_in(source: str) -> bool:
    """Return whether a source is texts that come with this package or another."""
    return source == "stand_in" or source.startswith(PACKAGE)


def _jsonl_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    for number, line in read_lines(source_shard):
        if isinstance(line, bytes):
            row = json_object(line)
            yield number, Rejected(row[0], source_shard.names[0], number, row[1]) if isinstance(row, tuple) else row
        else:
            yield number, line


def _tsv_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    """Yield the rows of a table as DPR's psgs_w100.tsv: a header, tabs, quotes doubled within quotes."""
    name = source_shard.names[0]
    header: list[str] | None = None
    if source_shard.start:  # the first source shard passes the header over as a line
        lines = (line for _, line in read_lines(replace(source_shard, start=0, stop=None)) if isinstance(line, bytes))
        header = next((cells for line in lines if isinstance(cells := table_cells(line), list)), None)
    for number, line in read_lines(source_shard):
        if not isinstance(line, bytes):
            yield number, line
            continue
        cells = table_cells(line)
        if isinstance(cells, tuple):
            yield number, Rejected(Reason.invalid_tsv, name, number, cells[1])
        elif header is None:
            if (again := twice(cells)) is not None:
                raise UserError(
                    f"{name}:{number}: the header has two columns named {again!r}; expected different names"
                )
            header = cells
            yield number, None
        elif len(cells) != len(header):
            detail = f"{len(cells)} columns, the header has {len(header)}"
            yield number, Rejected(Reason.wrong_columns, name, number, detail)
        else:
            yield number, dict(zip(header, cells, strict=True))


def _plan_parquet(path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    """Yield source shards of some of a file's row groups."""
    whole = SourceShard("parquet", (path,))
    if shard_bytes is None:
        yield whole
        return
    try:
        metadata = pq.ParquetFile(path).metadata
    except (pa.ArrowInvalid, OSError):  # reading the source shard says what is wrong with it
        yield whole
        return
    first, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= shard_bytes or group == metadata.num_row_groups - 1:
            yield SourceShard("parquet", (path,), first, group + 1)
            first, size = group + 1, 0


def _parquet_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    """Yield rows whose strings stay as they are stored until their row is read.

    A value that many rows share is stored once, so a few kilobytes can be gigabytes of rows. A string that no text may
    be as long as is not made at all.
    """
    name = source_shard.names[0]
    number = 0
    wanted = {field.partition(".")[0] for field in (fields.text, fields.id, fields.domain)}
    if (again := twice(column for column in _column_names(name) if column in wanted)) is not None:
        raise UserError(f"{name} has two columns named {again!r}; expected different names")
    try:
        leaves = _leaves(name, fields)
        # Strings stay as they are stored; Arrow does not do that within other fields.
        strings = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and "." not in leaf.path]
        file = pq.ParquetFile(name, read_dictionary=strings)
        stop = file.num_row_groups if source_shard.stop is None else source_shard.stop
        groups = list(range(source_shard.start, stop))
        # So few rows that BATCH_BYTES hold them, though each had the largest value that a nested column can hold
        nested, columns = {leaf.path for leaf in leaves if "." in leaf.path}, range(file.metadata.num_columns)
        chunks = [file.metadata.row_group(group).column(i) for group in groups for i in columns]
        sizes = (chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in nested)
        count = max(1, min(ROWS_AT_A_TIME, BATCH_BYTES // max([1, *sizes])))
        for batch in file.iter_batches(count, row_groups=groups, columns=[leaf.path for leaf in leaves]):
            for row in range(batch.num_rows):
                number += 1
                yield number, _row(batch, row, number, name, fields)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last two of values beyond their type
        detail = f"no whole Parquet file: {str(error).splitlines()[0]}"
        yield number, Rejected(Reason.damaged_file, name, number, detail)


def _leaves(name: str, fields: FieldMap) -> list[pq.ColumnSchema]:
    """Return the columns that are read: all of a field's own."""
    schema = pq.ParquetFile(name).schema
    wanted = (fields.text, fields.id, fields.domain)
    leaves = [schema.column(number) for number in range(len(schema.names))]
    return [leaf for leaf in leaves if any(f"{leaf.path}.".startswith(f"{field}.") for field in wanted)]


def _column_names(name: str) -> list[str]:
    try:
        return list(pq.read_schema(name).names)
    except (pa.ArrowException, OSError):  # reading the rows says what is wrong with it
        return []


def _row(batch: pa.RecordBatch, row: int, number: int, name: str, fields: FieldMap) -> dict | Rejected:
    values: dict[str, Any] = {}
    for column, field in zip(batch.columns, batch.schema, strict=True):
        value = column[row]
        if (size := _bytes(value)) > 4 * fields.max_characters:
            return Rejected(Reason.too_long, name, number, f"field '{field.name}' has {size} bytes")
        values[field.name] = value.as_py()
    return values


def _bytes(value: pa.Scalar) -> int:
    """Return the size of a string without making it, 0 for anything else."""
    if isinstance(value, pa.DictionaryScalar) and value.is_valid:
        value = value.dictionary[value.index.as_py()]
    buffer = value.as_buffer() if isinstance(value, pa.BinaryScalar | pa.StringScalar) else None
    return 0 if buffer is None else buffer.size


def plan_tree(paths: Iterable[Path], root: str, shard_bytes: int) -> Iterator[SourceShard]:
    """Yield source shards of some files each, in the order of the files."""
    names: list[str] = []
    size = 0
    for path in paths:
        names.append(str(path))
        size += path.stat().st_size
        if size >= shard_bytes:
            yield SourceShard("text", tuple(names), root=root)
            names, size = [], 0
    if names:
        yield SourceShard("text", tuple(names), root=root)


def _read_text(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    with ExitStack() as stack:
        has_pages = any(format_of(Path(name)) == "HTML" for name in source_shard.names)
        pages = stack.enter_context(main_texts()) if has_pages else None
        for name in source_shard.names:
            if pages is not None and format_of(Path(name)) == "HTML":
                yield 0, _whole(name, source_shard.root, fields, pages)
            elif (problem := _file_problem(name)) is not None:
                yield 0, problem
            elif fields.new_text_at:
                limits = FieldMap(max_characters=fields.max_characters)
                yield from joined_texts(_text_lines(name, fields.max_characters), limits, name, fields.new_text_at)
            else:
                yield 0, _whole(name, source_shard.root, fields)


def _whole(name: str, root: str, fields: FieldMap, pages: MainTexts | None = None) -> SourceText | Rejected:
    most = BYTES_OF_A_CHARACTER * (fields.max_characters + 1)  # a byte order mark among them
    try:
        with open_file(Path(name)) as file:
            content = file.read(most + 1)
    except UNREADABLE as error:  # of a page, which was not looked at before
        return Rejected(Reason.unreadable_file, name, 0, getattr(error, "strerror", None) or str(error))
    if len(content) > most:
        return Rejected(Reason.too_long, name, 0, f"over {most} bytes, more than a text may have")
    kind = format_of(Path(name))
    text = content.decode("utf-8-sig") if pages is None else pages(content)
    if text is None:
        return Rejected(Reason.no_main_text, name, 0, "no main text was found in the page")
    if not text.strip():
        return Rejected(Reason.empty_file, name, 0, "the file is empty")
    label = text_id(name, root)
    domain = label.partition("/")[0] if "/" in label else "all"
    if kind in PROSE:
        text = text.replace("\r\n", "\n").replace("\f", "\n")  # the ends of lines, and of a PDF's pages
        text = text if kind == "HTML" else plain_markup(text, unpacked_suffix(Path(name)))
    return checked_text(SourceText(label, text, domain, is_prose=kind in PROSE), fields, name, 0)


def text_id(name: str, root: str) -> str:
    """Return what a file of a tree of texts is called: its path below the root, without bytes that are no UTF-8."""
    return readable_name(str(Path(name).relative_to(root)) if root else Path(name).name)


def _text_lines(name: str, max_characters: int) -> Iterator[Row]:
    """Yield lines; one that is longer than a text may be gives a part that is so as well."""
    most = BYTES_OF_A_CHARACTER * (max_characters + 2)
    with open_file(Path(name)) as file:
        number = 0
        while line := file.readline(most):
            number += 1
            if len(line) == most and not line.endswith(b"\n"):
                skip_line(file)
            yield number, {"text": line.decode("utf-8-sig" if number == 1 else "utf-8", errors="ignore")}


def _file_problem(name: str) -> Rejected | None:
    """Return why a file is not a text, found without holding it."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open_file(Path(name)) as file:
            while True:
                part = file.read(READ_BYTES)
                waiting = len(decoder.getstate()[0])
                decoder.decode(part, final=not part)
                if not part:
                    return None
                done += len(part)
    except UnicodeDecodeError as error:
        at = other_format(Path(name)) or f"at byte {done - waiting + error.start}"
        return Rejected(Reason.not_utf8, name, 0, f"{at}; convert the file, or leave it out of the source")
    except UNREADABLE as error:
        return Rejected(Reason.unreadable_file, name, 0, getattr(error, "strerror", None) or str(error))


def plan_hub(name: str) -> Iterator[SourceShard]:
    """Yield the shards of a split of a dataset, which are streamed.

    A dataset is written NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT, such as
    Salesforce/wikitext:wikitext-103-raw-v1:test, or NAME::SPLIT if it has one configuration. Without a split it is
    `train`; evaluations read `test` (`named_split`).
    """
    for shard in range(_open_hub(name).num_shards):
        yield SourceShard("hub", (name,), shard)


def _hub_rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
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


ROWS: dict[str, Callable[[SourceShard, FieldMap], Iterator[Row]]] = {
    "jsonl": _jsonl_rows,
    "tsv": _tsv_rows,
    "parquet": _parquet_rows,
    "hub": _hub_rows,
}
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "text": (".txt", ".text", ".tokens", ".raw"),
    "markup": (".md", ".markdown", ".mdx", ".rst", ".org", ".adoc", ".asciidoc"),
    "HTML": (".html", ".htm", ".xhtml"),
    "CSV": (".csv",),
}
NO_TEXTS = ("json", "CSV")  # data, of which a file is never one text
PROSE = ("text", "markup", "HTML")
EXPECTED = {"tsv": "a table with tabs", "parquet": "Parquet"} | dict.fromkeys(("jsonl", "json"), "JSON Lines")
