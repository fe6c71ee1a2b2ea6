"""Pieces on their way from the source to the set: sorted runs, of which any range of keys can be read alone.

A source shard writes a run of each split for about every six million characters: none is ever in memory as a whole.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa

from replug.data.files import writing


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """A piece that may become a document. `version` is the hash of the whole text it was cut from."""

    key: int
    digest: bytes
    id: str
    text: str
    domain: str
    source: str
    version: int


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """A piece that may become a query or held-out text; `tail` is the key of its continuation alone."""

    key: int
    digest: bytes
    id: str
    context: str
    continuation: str
    domain: str
    source: str
    version: int
    tail: int


Piece = DocumentPiece | WindowPiece
TYPES = {"key": pa.uint64(), "digest": pa.binary(16), "version": pa.uint64(), "tail": pa.uint64()}
ORDER = [("key", "ascending"), ("digest", "ascending"), ("version", "ascending"), ("id", "ascending")]
ORDER += [("domain", "ascending")]  # a text may come twice in two domains


def schema_of(kind: type[Piece]) -> pa.Schema:
    return pa.schema([(field.name, TYPES.get(field.name, pa.string())) for field in fields(kind)])


def write_run(path: Path, pieces: list, kind: type[Piece]) -> None:
    """Sort pieces and write them as one batch, whose keys can be searched without reading the texts."""
    columns = {field.name: [getattr(piece, field.name) for piece in pieces] for field in fields(kind)}
    table = pa.Table.from_pydict(columns, schema=schema_of(kind)).sort_by(ORDER).combine_chunks()
    with writing(path), pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_range(runs: Iterable[Path], kind: type[Piece], low: int, high: int) -> pa.Table:
    """All pieces with low <= key < high, in the order of their keys, whatever the order of the runs."""
    found = [schema_of(kind).empty_table()]
    for run in runs:
        part = _slice(run, low, high)
        if part is not None:
            found.append(part)
    merged = pa.concat_tables(found).sort_by(ORDER)
    found.clear()
    pa.default_memory_pool().release_unused()  # else a worker's memory grows from range to range
    return merged


def _slice(run: Path, low: int, high: int) -> pa.Table | None:
    """Copied out of the mapped file, which is closed again: there may be thousands."""
    with pa.memory_map(str(run)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
        keys = batch.column("key").to_numpy()
        start = int(np.searchsorted(keys, np.uint64(low)))
        stop = len(keys) if high >= 2**64 else int(np.searchsorted(keys, np.uint64(high)))
        if start == stop:
            return None
        return pa.Table.from_batches([batch.take(pa.array(np.arange(start, stop)))])


def iterate(table: pa.Table) -> Iterator[dict]:
    """Rows of a table, a batch at a time as Python objects."""
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()
