"""JSON Lines: a source shard is a range of bytes of a file, or a file where it is compressed."""

import json
from collections.abc import Iterator

from replug.data.sources.formats import row_format
from replug.data.sources.lines import byte_ranges, read_lines
from replug.data.sources.records import FieldMap, Passed, Reason, Rejected, Row, SourceShard


def _plan(path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    return byte_ranges("jsonl", path, shard_bytes)


def _rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    for line in read_lines(source_shard):
        yield line if isinstance(line, Rejected | Passed) else _row(line, source_shard.names[0])


def _row(line: tuple[int, bytes], name: str) -> Row:
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


FORMAT = row_format("jsonl", (".jsonl", ".json", ".ndjson"), _plan, _rows)
