"""Parquet: a source shard is some of a file's row groups.

A value that many rows share is stored once, so a few kilobytes can be gigabytes of rows. Strings stay as they are
stored until their row is read, one at a time, and one that no text may be as long as is not made at all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from replug.data.sources.formats import row_format
from replug.data.sources.records import FieldMap, Reason, Rejected, Row, SourceShard

ROWS_AT_A_TIME = 256
BATCH_BYTES = 1 << 28


def _plan(path: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    whole = SourceShard(0, "parquet", (path,), Path(path).stat().st_size)
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
            yield SourceShard(0, "parquet", (path,), size, first, group + 1)
            first, size = group + 1, 0


def _rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    name = source_shard.names[0]
    number = 0
    try:
        leaves = _leaves(name, fields)
        # Strings stay as they are stored; Arrow does not do that within other fields.
        strings = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and "." not in leaf.path]
        file = pq.ParquetFile(name, read_dictionary=strings)
        stop = file.num_row_groups if source_shard.stop is None else source_shard.stop
        groups = list(range(source_shard.start, stop))
        # So few that BATCH_BYTES hold them, though each had the largest value that a column within others can hold
        chunks = [
            file.metadata.row_group(group).column(i) for group in groups for i in range(file.metadata.num_columns)
        ]
        largest = max(
            (
                chunk.total_uncompressed_size
                for chunk in chunks
                if chunk.path_in_schema in [leaf.path for leaf in leaves if "." in leaf.path]
            ),
            default=0,
        )
        count = max(1, min(ROWS_AT_A_TIME, BATCH_BYTES // max(largest, 1)))
        for batch in file.iter_batches(count, row_groups=groups, columns=[leaf.path for leaf in leaves]):
            for row in range(batch.num_rows):
                number += 1
                yield _row(batch, row, number, name, fields)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last two of values beyond their type
        yield Rejected(Reason.damaged_file, name, number, f"no whole Parquet file: {str(error).splitlines()[0]}")


def _leaves(name: str, fields: FieldMap) -> list[pq.ColumnSchema]:
    """The columns that are read: all of a field's own."""
    schema = pq.ParquetFile(name).schema
    wanted = (fields.text, fields.id, fields.domain)
    leaves = [schema.column(number) for number in range(len(schema.names))]
    return [leaf for leaf in leaves if any(f"{leaf.path}.".startswith(f"{field}.") for field in wanted)]


def _row(batch: pa.RecordBatch, row: int, number: int, name: str, fields: FieldMap) -> Row:
    values: dict[str, Any] = {}
    for column, field in zip(batch.columns, batch.schema, strict=True):
        value = column[row]
        if (size := _bytes(value)) > 4 * fields.max_characters:
            return Rejected(Reason.too_long, name, number, f"field '{field.name}' has {size} bytes")
        values[field.name] = value.as_py()
    return number, values


def _bytes(value: pa.Scalar) -> int:
    """Of a string, without making it; 0 of anything else."""
    if isinstance(value, pa.DictionaryScalar) and value.is_valid:
        value = value.dictionary[value.index.as_py()]
    buffer = value.as_buffer() if isinstance(value, pa.BinaryScalar | pa.StringScalar) else None
    return 0 if buffer is None else buffer.size


FORMAT = row_format("parquet", (".parquet",), _plan, _rows)
