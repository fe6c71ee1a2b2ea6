"""JSON Lines: a source shard is a range of bytes of a file, or a file where it is compressed."""

from collections.abc import Iterator

from replug.data.sources.formats import row_format
from replug.data.sources.lines import byte_ranges, json_object, read_lines
from replug.data.sources.records import FieldMap, Passed, Rejected, Row, SourceShard


def _plan(path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    return byte_ranges("jsonl", path, shard_bytes)


def _rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    for line in read_lines(source_shard):
        if isinstance(line, Rejected | Passed):
            yield line
            continue
        number, content = line
        row = json_object(content)
        yield Rejected(row[0], source_shard.names[0], number, row[1]) if isinstance(row, tuple) else (number, row)


FORMAT = row_format("jsonl", (".jsonl", ".json", ".ndjson"), _plan, _rows)
