"""A dataset on the hub, `NAME` or `NAME:CONFIGURATION`: a source shard is one of its shards, streamed."""

from collections.abc import Iterator

import httpx

from replug.configs.errors import RunError, UserError
from replug.data.sources.format import row_format
from replug.data.sources.records import FieldMap, Row, SourceShard


def _plan(name: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    for shard in range(_open(name).num_shards):
        yield SourceShard(0, "hub", (name,), 0, shard)


def _rows(source_shard: SourceShard, fields: FieldMap) -> Iterator[Row]:
    """Raises RunError where the hub breaks off: what is missing is no bad row."""
    name, number = source_shard.names[0], 0
    dataset = _open(name)
    try:
        for number, row in enumerate(dataset.shard(num_shards=dataset.num_shards, index=source_shard.start), start=1):
            yield number, row
    except (OSError, httpx.HTTPError) as error:
        raise RunError(
            f"data.source: {name} broke off after row {number} of shard {source_shard.start} ({error}); what is "
            "finished is kept: run the same command again"
        ) from error


def _open(name: str):  # type: ignore[no-untyped-def]
    """The train split, streamed."""
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    try:
        return load_dataset(path, configuration or None, split="train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"data.source: cannot open the dataset {name}: {str(error).strip().splitlines()[0]}") from error


FORMAT = row_format("hub", (), _plan, _rows)  # it claims nothing: it is asked for what is no file and nobody's
