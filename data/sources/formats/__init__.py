"""The formats of sources, one module each, found by listing this folder: a new one is one file.

A module here has a `FORMAT`, a `Format`.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from replug.data.sources.lines import COMPRESSION
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


@cache
def formats() -> dict[str, Format]:
    """Every format by its name."""
    found = [import_module(f"{__name__}.{module.name}").FORMAT for module in pkgutil.iter_modules(__path__)]
    return {one.name: one for one in found}


def format_of_file(path: Path) -> Format | None:
    """The format of a file by its suffix, of a compressed one by the suffix before; None where it is not known."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSION:
        suffix = Path(path.stem).suffix.lower()
    return next((one for one in formats().values() if suffix in one.suffixes), None)


def holds_rows(path: Path) -> bool:
    """Whether a file's suffix is one of a format of rows."""
    found = format_of_file(path)
    return found is not None and found.holds_rows
