"""Ids that occur more than once in a source: one text keeps the id, which follows from its words and not its place.

A source shard registers every text as (hash of its id, hash of its words, line). Registers are sorted, so that a range
of hashes is read from all of them at once and memory does not grow with the source.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from replug.data.files import writing
from replug.data.sources.rejected import EXAMPLES, Reason, Rejected

REGISTRY = np.dtype([("id", np.uint64), ("version", np.uint64), ("line", np.int64), ("named", np.bool_)])
KEPT = np.dtype([("id", np.uint64), ("version", np.uint64)])
TEXTS_AT_A_TIME = 1 << 20


def write_registry(path: Path, texts: Sequence[tuple[int, int, int, bool]]) -> None:
    """Write who was read: hash of the id, hash of the words, line, and whether the id was given."""
    registry = np.sort(np.array(list(texts), REGISTRY), order=("id", "version", "line"))
    with writing(path):
        np.save(path, registry, allow_pickle=False)


def find_duplicates(folders: Sequence[Path], num_texts: int, out: Path) -> tuple[int, int, list[tuple[int, int]]]:
    """Write `out`: the version kept of each id that occurs twice.

    Returns how many texts came again under an id that was given, how many without one (their words are their id), and
    source shard and line of the first hundred of the former.
    """
    registers = [
        (source_shard, path)
        for source_shard, folder in enumerate(folders)
        for path in sorted(folder.glob("texts-*.npy"))
    ]
    number = max(1, -(-num_texts // TEXTS_AT_A_TIME))
    kept, places, again = [], [], [0, 0]
    for part in range(number):
        low, high = 2**64 * part // number, 2**64 * (part + 1) // number
        rows = _rows_between(registers, low, high)
        repeated = np.flatnonzero(rows["id"][1:] == rows["id"][:-1]) + 1
        kept.append(_first_versions(rows, repeated))
        named = rows["named"][repeated]
        again[0] += int(named.sum())
        again[1] += int((~named).sum())
        places += [(int(row["source_shard"]), int(row["line"])) for row in rows[repeated[named]]]
        places = sorted(places)[:EXAMPLES]
    with writing(out):
        np.save(out, np.concatenate(kept), allow_pickle=False)
    return again[0], again[1], places


def rejected_duplicates(places: Sequence[tuple[int, int]], files: Sequence[str]) -> list[Rejected]:
    """The listed cases, by the first file of their source shard."""
    detail = "another text has this id; data.id_field must name a field that tells all texts apart"
    return [Rejected(Reason.duplicate_id, files[source_shard], line, detail) for source_shard, line in places]


def _rows_between(registers: list[tuple[int, Path]], low: int, high: int) -> np.ndarray:
    """Rows of all registers with low <= id < high, sorted by id, version, source shard and line."""
    kind = np.dtype([*REGISTRY.descr, ("source_shard", np.int64)])
    parts = [np.empty(0, kind)]
    for source_shard, path in registers:
        register = np.load(path, mmap_mode="r", allow_pickle=False)
        start = np.searchsorted(register["id"], np.uint64(low))
        stop = len(register) if high == 2**64 else np.searchsorted(register["id"], np.uint64(high))
        part = np.empty(stop - start, kind)
        for name in REGISTRY.names or ():
            part[name] = register[name][start:stop]
        part["source_shard"] = source_shard
        parts.append(part)
    return np.sort(np.concatenate(parts), order=("id", "version", "source_shard", "line"))


def _first_versions(rows: np.ndarray, repeated: np.ndarray) -> np.ndarray:
    """For each id that occurs again its first version; rows are sorted."""
    ids = np.unique(rows["id"][repeated])
    first = np.searchsorted(rows["id"], ids)
    kept = np.empty(len(ids), KEPT)
    kept["id"], kept["version"] = ids, rows["version"][first]
    return kept
