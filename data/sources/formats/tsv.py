"""Tables as DPR's psgs_w100.tsv: a header, tabs, quotes doubled within quotes, a row on each line.

A source shard is a range of bytes of a file, or a file where it is compressed.
"""

from collections.abc import Iterator
from dataclasses import replace

from replug.data.sources.formats import row_format
from replug.data.sources.lines import byte_ranges, read_lines, table_cells
from replug.data.sources.records import FieldMap, Passed, Reason, Rejected, Row, SourceShard


def _plan(path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    return byte_ranges("tsv", path, shard_bytes)


def _rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    name = source_shard.names[0]
    header = _header(source_shard) if source_shard.start else None  # the first source shard passes it over as a line
    for line in read_lines(source_shard):
        if isinstance(line, Rejected | Passed):
            yield line
            continue
        cells = table_cells(line[1])
        if isinstance(cells, tuple):
            yield Rejected(Reason.invalid_tsv, name, line[0], cells[1])
        elif header is None:
            header = cells
            yield Passed(line[0])
        elif len(cells) != len(header):
            yield Rejected(Reason.wrong_columns, name, line[0], f"{len(cells)} columns, the header has {len(header)}")
        else:
            yield line[0], dict(zip(header, cells, strict=True))


def _header(source_shard: SourceShard) -> list[str] | None:
    """The first line of the file that is a row."""
    lines = (line for line in read_lines(replace(source_shard, start=0, stop=None)) if isinstance(line, tuple))
    return next((cells for _, line in lines if isinstance(cells := table_cells(line), list)), None)


FORMAT = row_format("tsv", (".tsv",), _plan, _rows)
