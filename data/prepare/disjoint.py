"""The proof that the corpus, training, development and held-out splits share no text.

No source document serves two splits, and no text of one split equals a text of another (by content hash, white space
and case aside). All workers map what a split must not overlap, in sorted files of hashes of 8 bytes:

    FILTER/keys.u64      every example's whole text and its continuation alone
    FILTER/sources.u64   what they were cut from
    FILTER/ngrams.u64    their n-grams of words, if compared, without the ones that most sources share
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.files import replace_file, writing
from replug.data.records import Example
from replug.data.sampling import piece_key
from replug.data.shards import read_documents_of
from replug.data.words import content_hash, hash64, ngram_hashes, overlaps, without_common

PARTITIONS = 16
HASHES_IN_MEMORY = 1 << 22
LEAST_COMMON = 5  # sources
NOTHING = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class OverlapFilter:
    """Sorted hashes uint64; `n` words make an n-gram, None where they are not compared."""

    keys: np.ndarray
    sources: np.ndarray
    ngrams: np.ndarray
    n: int | None

    @staticmethod
    def load(folder: Path) -> "OverlapFilter":
        n = int((folder / "n").read_text())
        paths = (folder / f"{name}.u64" for name in ("keys", "sources", "ngrams"))
        keys, sources, ngrams = (np.memmap(path, np.uint64, "r") if path.stat().st_size else NOTHING for path in paths)
        return OverlapFilter(keys, sources, ngrams, n or None)

    def knows_text(self, *keys: int) -> bool:
        return overlaps(np.array(keys, np.uint64), self.keys)

    def knows_ngram(self, text: str) -> bool:
        return self.n is not None and overlaps(ngram_hashes(text, self.n), self.ngrams)


def write_overlap_filter(
    folder: Path, examples: Iterable[Example], n: int | None, seed: int, common: np.ndarray = NOTHING
) -> OverlapFilter:
    """Write the hashes of examples, without n-grams that overlap `common` ones (sorted).

    Memory does not grow with the number of examples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keys, sources, ngrams = (SortedHashes(folder / f"{name}.u64") for name in ("keys", "sources", "ngrams"))
    for example in examples:
        keys.add(np.array(example_keys(example, seed), np.uint64))
        if example.source:  # the user's own may name none
            sources.add(np.array([hash64(example.source)], np.uint64))
        if n is not None:
            ngrams.add(without_common(ngram_hashes(example.context + example.continuation, n), n, common))
    for hashes in (keys, sources, ngrams):
        hashes.finish()
    replace_file(folder / "n", str(n or 0).encode())
    return OverlapFilter.load(folder)


def common_ngrams(hashes_by_source: Iterable[np.ndarray]) -> np.ndarray:
    """Return the n-grams, sorted hashes, that half of the sources hold: headers, footers and licences are no leak.

    Each array is of one source. Of fewer than five sources nothing is common.
    """
    unique = [np.unique(hashes) for hashes in hashes_by_source]
    hashes, counts = np.unique(np.concatenate([NOTHING, *unique]), return_counts=True)
    return hashes[counts >= common_from(len(unique))]


def common_from(num_sources: int) -> int:
    """Return the number of sources that must hold an n-gram to make it common."""
    return max(LEAST_COMMON, -(-num_sources // 2))


def example_keys(example: Example, seed: int = 0) -> tuple[int, int]:
    """Return the keys of a whole text and of its continuation alone, which no document may equal."""
    tail = piece_key(content_hash(example.continuation, seed))
    return piece_key(content_hash(example.context + example.continuation, seed)), tail


class SortedHashes:
    """Collects hashes into one sorted file without repetitions, a sixteenth of them in memory at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0
        self._held: list[np.ndarray] = []
        self._parts = [path.with_suffix(f".part{number:02d}") for number in range(PARTITIONS)]
        for part in self._parts:
            part.unlink(missing_ok=True)

    def add(self, hashes: np.ndarray) -> None:
        self._held.append(hashes)
        self._count += len(hashes)
        if self._count >= HASHES_IN_MEMORY:
            self._write_parts()

    def finish(self) -> None:
        self._write_parts()
        with writing(self._path), self._path.open("wb") as file:
            for part in self._parts:
                np.unique(np.fromfile(part, np.uint64)).tofile(file)
                part.unlink()

    def _write_parts(self) -> None:
        hashes = np.concatenate([NOTHING, *self._held])
        places = (hashes >> np.uint64(60)).astype(np.int64)
        for number, part in enumerate(self._parts):
            with writing(part), part.open("ab") as file:
                file.write(hashes[places == number].tobytes())
        self._held, self._count = [], 0


@dataclass(frozen=True)
class DisjointProof:
    """Counts of what was compared and what overlapped; every overlap is listed by its ids."""

    num_documents: int
    num_queries: int
    num_heldout: int
    shared_sources: tuple[str, ...] = ()
    equal_texts: tuple[str, ...] = ()
    num_dev: int = 0
    ngram: int | None = None  # words of an n-gram that no document shares with a text, where this was compared

    @property
    def holds(self) -> bool:
        return not self.shared_sources and not self.equal_texts

    def __str__(self) -> str:
        return (
            f"disjoint: {self.num_documents} documents, {self.num_queries} queries, {self.num_heldout} held-out"
            + (f", {self.num_dev} development texts" if self.num_dev else "")
            + f"; {len(self.shared_sources)} shared sources, {len(self.equal_texts)} equal texts"
            + (f" or {self.ngram} words in common" if self.ngram else "")
        )


def prove_examples(
    examples: Iterable[Example], before: OverlapFilter, seed: int, name: str
) -> tuple[list[str], list[str]]:
    """Return shared sources and equal texts of a split and of those before it. `name` is that of one of its texts."""
    texts = (
        (
            f"{name} {example.id}",
            example.source or "",
            example_keys(example, seed)[:1],  # texts of two splits may have one continuation, such as yes
            example.context + example.continuation,
        )
        for example in examples
    )
    return _overlaps(before, texts)


def prove_shard(shard: Path, filter_folder: Path, seed: int) -> tuple[list[str], list[str]]:
    """Return shared sources and equal texts of the documents in a file and of the filter's queries and other texts."""
    texts = (
        (f"document {doc.id}", doc.source, (piece_key(content_hash(doc.text, seed)),), doc.text)
        for doc in read_documents_of(shard)
    )
    return _overlaps(OverlapFilter.load(filter_folder), texts)


def _overlaps(
    known: OverlapFilter, texts: Iterable[tuple[str, str, tuple[int, ...], str]]
) -> tuple[list[str], list[str]]:
    """Compare texts, each with its name, source and keys."""
    shared, equal = [], []
    for name, source, keys, text in texts:
        if source and overlaps(np.array([hash64(source)], np.uint64), known.sources):
            shared.append(f"{name} and a text of another split both come from source {source}")
        if known.knows_text(*keys):
            equal.append(f"{name} equals a text of another split or its continuation")
        if known.knows_ngram(text):
            equal.append(f"{name} shares {known.n} words with a text of another split")
    return shared, equal


def require_disjoint(proof: DisjointProof) -> None:
    """Raise UserError naming the first overlaps."""
    if not proof.holds:
        overlaps = [*proof.shared_sources, *proof.equal_texts]
        raise UserError(
            f"corpus, queries and held-out texts overlap in {len(overlaps)} places, so the result would be a leak: "
            f"{'; '.join(overlaps[:3])}{'; ...' if len(overlaps) > 3 else ''}. Remove them from one split"
        )
