"""`stand_in` and `package:NAME`: texts that come with this package or another. A source shard is all of it."""

from collections.abc import Iterator

from replug.data.sources.built_in_texts import read_package_texts, stand_in_texts
from replug.data.sources.formats import Format
from replug.data.sources.records import FieldMap, Item, SourceShard

PACKAGE = "package:"


def _claims(source: str) -> bool:
    return source == "stand_in" or source.startswith(PACKAGE)


def _plan(source: str, shard_bytes: int | None) -> Iterator[SourceShard]:
    yield SourceShard(0, "built_in", (source,), 0)


def _read(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
    source = source_shard.names[0]
    texts = stand_in_texts() if source == "stand_in" else read_package_texts(source.removeprefix(PACKAGE))
    return enumerate(texts, start=1)


FORMAT = Format("built_in", _plan, _read, claims=_claims)
