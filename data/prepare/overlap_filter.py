"""What a split must not overlap: hashes of other splits' texts, sorted in files that all workers map.

    FILTER/keys.u64      every window's whole text and its continuation alone
    FILTER/sources.u64   what they were cut from
    FILTER/ngrams.u64    their n-grams of words, where these are compared

8 bytes each, so 800K texts take 20 MB, and 1 GB more with their 13-grams; only what is looked up is read into memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.data.files import replace_file, writing
from replug.data.hashing import content_hash, hash64
from replug.data.prepare.ngrams import ngram_hashes, overlaps
from replug.data.records import Window
from replug.data.sampling import piece_key

PARTITIONS = 16
HASHES_IN_MEMORY = 1 << 22


@dataclass(frozen=True, slots=True)
class OverlapFilter:
    """Sorted hashes uint64; `n` words make an n-gram, None where they are not compared."""

    keys: np.ndarray
    sources: np.ndarray
    ngrams: np.ndarray
    n: int | None

    @staticmethod
    def empty() -> "OverlapFilter":
        nothing = np.empty(0, np.uint64)
        return OverlapFilter(nothing, nothing, nothing, None)

    @staticmethod
    def load(folder: Path) -> "OverlapFilter":
        n = int((folder / "n").read_text())
        keys, sources, ngrams = (_mapped(folder / f"{name}.u64") for name in ("keys", "sources", "ngrams"))
        return OverlapFilter(keys, sources, ngrams, n or None)

    def knows_text(self, key: int, tail: int | None = None) -> bool:
        keys = np.array([key] if tail is None else [key, tail], np.uint64)
        return overlaps(keys, self.keys)

    def knows_ngram(self, text: str) -> bool:
        return self.n is not None and overlaps(ngram_hashes(text, self.n), self.ngrams)

    def knows_source(self, source: str) -> bool:
        return overlaps(np.array([hash64(source)], np.uint64), self.sources)


def write_overlap_filter(folder: Path, windows: Iterable[Window], n: int | None, seed: int) -> OverlapFilter:
    """Write the hashes of windows; memory does not grow with their number."""
    folder.mkdir(parents=True, exist_ok=True)
    keys, sources, ngrams = (SortedHashes(folder / f"{name}.u64") for name in ("keys", "sources", "ngrams"))
    for window in windows:
        keys.add(np.array(window_keys(window, seed), np.uint64))
        sources.add(np.array([hash64(window.source or "")], np.uint64))
        if n is not None:
            ngrams.add(ngram_hashes(window.context + window.continuation, n))
    for hashes in (keys, sources, ngrams):
        hashes.finish()
    replace_file(folder / "n", str(n or 0).encode())
    return OverlapFilter.load(folder)


def window_keys(window: Window, seed: int) -> tuple[int, int]:
    """What a document must not equal: the whole text, and the continuation that is to be predicted."""
    texts = (window.context + window.continuation, window.continuation)
    whole, tail = (piece_key(content_hash(text, seed)) for text in texts)
    return whole, tail


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
        hashes = np.concatenate([np.empty(0, np.uint64), *self._held])
        places = (hashes >> np.uint64(60)).astype(np.int64)
        for number, part in enumerate(self._parts):
            with writing(part), part.open("ab") as file:
                file.write(hashes[places == number].tobytes())
        self._held, self._count = [], 0


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint64, "r") if path.stat().st_size else np.empty(0, np.uint64)
