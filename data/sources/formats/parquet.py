"""Parquet: a source shard is some of a file's row groups."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replug.data.sources.format import row_format
from replug.data.sources.records import FieldMap, Row, SourceShard
from replug.data.sources.rejected import Reason, Rejected

ROWS_AT_A_TIME = 256


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
        file = pq.ParquetFile(name)
        stop = file.num_row_groups if source_shard.stop is None else source_shard.stop
        tops = {path.split(".")[0] for path in (fields.text, fields.id, fields.domain)}
        columns = [column for column in file.schema_arrow.names if column in tops]
        groups = list(range(source_shard.start, stop))
        for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        yield Rejected(Reason.damaged_file, name, number, f"no whole Parquet file: {str(error).splitlines()[0]}")


FORMAT = row_format("parquet", (".parquet",), _plan, _rows)
