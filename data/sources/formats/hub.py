"""A dataset on the hub: a source shard is one of the shards of a split, streamed.

It is written NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT: Salesforce/wikitext:wikitext-103-raw-v1:test, or
NAME::SPLIT where it has one configuration. Without a split it is `train`; evaluations read `test` (`named_split`).
"""

from collections.abc import Iterator

import httpx

from replug.config.errors import RunError, UserError
from replug.data.sources.formats import row_format
from replug.data.sources.records import FieldMap, Row, SourceShard

TRAIN = "train"


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


def named_split(name: str, split: str) -> str:
    """The name with this split, where it says none."""
    dataset, _, rest = name.partition(":")
    configuration, _, own = rest.partition(":")
    return f"{dataset}:{configuration}:{own or split}"


def _open(name: str):  # type: ignore[no-untyped-def]
    """A split, streamed."""
    from datasets import load_dataset

    path, configuration, split = named_split(name, TRAIN).split(":", 2)
    try:
        splits = load_dataset(path, configuration or None, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"data.source: cannot open the dataset {name}: {str(error).strip().splitlines()[0]}") from error
    if split not in splits:
        raise UserError(
            f"data.source: {name} has no split {split!r}; expected one of {', '.join(map(str, splits))}, such as "
            f"{path}:{configuration}:{next(iter(splits))}"
        )
    return splits[split]


FORMAT = row_format("hub", (), _plan, _rows)  # it claims nothing: it is asked for what is no file and nobody's
