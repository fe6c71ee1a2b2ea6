"""What a format of sources has to say: the contract of the modules in `data/sources/formats/`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from replug.data.sources.records import FieldMap, Item, Row, SourceShard
from replug.data.sources.row_texts import texts_of_rows


def _nothing(source: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Format:
    """How a form of source is told from others, divided among workers, and read.

    `plan(name, shard_bytes)` gives the source shards of a file, or of a source that the format claims: of about
    `shard_bytes` each, or with None the whole file in one, since its texts run over many rows. Their numbers are given
    to them later. `read(source_shard, fields)` gives its texts, each with where it stands; what cannot be read is
    handed on with its reason, never passed over.
    """

    name: str
    plan: Callable[[str, int | None], Iterable[SourceShard]]
    read: Callable[[SourceShard, FieldMap], Iterator[Item]]
    suffixes: tuple[str, ...] = ()  # of its files
    holds_rows: bool = True  # a folder of nothing but files of rows is read as rows, any other as a tree of texts
    claims: Callable[[str], bool] = _nothing  # sources that are no files, such as package:NAME


def row_format(
    name: str,
    suffixes: tuple[str, ...],
    plan: Callable[[str, int | None], Iterable[SourceShard]],
    rows: Callable[[SourceShard, FieldMap], Iterator[Row]],
) -> Format:
    """A format whose rows are dictionaries, out of which `data.text_field` and the others are taken."""

    def read(source_shard: SourceShard, fields: FieldMap) -> Iterator[Item]:
        return texts_of_rows(rows(source_shard, fields), fields, source_shard.names[0])

    return Format(name, plan, read, suffixes)
