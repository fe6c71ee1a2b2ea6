"""The proof that the corpus, training, development and held-out splits share no text.

No source document serves two splits, and no text of one split equals a text of another (by content hash, white space
and case aside). All workers map what a split must not overlap, in sorted files of hashes of 8 bytes:

    FILTER/keys.u64      every example's whole text and its continuation alone
    FILTER/sources.u64   what they were cut from
    FILTER/ngrams.u64    their n-grams of words, if compared, without the ones that most sources share
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.files import replace_file, writing
from replug.data.records import Example
from replug.data.sampling import piece_key
from replug.data.shards import in_batches, read_documents_of, read_examples_of
from replug.data.words import content_hash, hash64, ngram_hashes, overlaps, without_common

PARTITIONS = 16
ARRAYS_IN_MEMORY = 1 << 14  # of an example each
LEAST_COMMON = 5  # sources
NOTHING = np.empty(0, np.uint64)


class OverlapFilter:
    """The sorted hashes of a folder, mapped; `n` words make an n-gram, None where they are not compared."""

    def __init__(self, folder: Path) -> None:
        self.n = int((folder / "n").read_text()) or None
        paths = (folder / f"{name}.u64" for name in ("keys", "sources", "ngrams"))
        maps = (np.memmap(path, np.uint64, "r") if path.stat().st_size else NOTHING for path in paths)
        self.keys, self.sources, self.ngrams = maps

    def knows_text(self, *keys: int) -> bool:
        return overlaps(np.array(keys, np.uint64), self.keys)

    def knows_ngram(self, text: str) -> bool:
        return self.n is not None and overlaps(ngram_hashes(text, self.n), self.ngrams)


def write_overlap_filter(
    folder: Path, examples: Callable[[], Iterable[Example]], n: int | None, seed: int, common: np.ndarray = NOTHING
) -> OverlapFilter:
    """Write the hashes of examples, without n-grams that overlap `common` ones (sorted).

    Memory does not grow with the number of examples, which are read once for each file.
    """

    def ngrams() -> Iterator[np.ndarray]:
        if n is not None:
            for example in examples():
                yield without_common(ngram_hashes(example.context + example.continuation, n), n, common)

    folder.mkdir(parents=True, exist_ok=True)
    write_sorted(folder / "keys.u64", (np.array(example_keys(of, seed), np.uint64) for of in examples()))
    sources = (example.source for example in examples())
    write_sorted(folder / "sources.u64", (np.array([hash64(of)], np.uint64) for of in sources if of))  # the user's own
    write_sorted(folder / "ngrams.u64", ngrams())
    replace_file(folder / "n", str(n or 0).encode())
    return OverlapFilter(folder)


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


def write_sorted(path: Path, hashes: Iterable[np.ndarray]) -> None:
    """Write hashes into one sorted file without repetitions, a sixteenth of them in memory at a time."""
    parts = [path.with_suffix(f".part{number:02d}") for number in range(PARTITIONS)]
    with writing(path), ExitStack() as opened:
        files = [opened.enter_context(part.open("wb")) for part in parts]
        for batch in in_batches(hashes, ARRAYS_IN_MEMORY):
            held = np.concatenate(batch)
            for number, file in enumerate(files):
                file.write(held[held >> np.uint64(60) == number].tobytes())
    with writing(path), path.open("wb") as file:
        for part in parts:
            np.unique(np.fromfile(part, np.uint64)).tofile(file)
            part.unlink()


def overlaps_of_examples(path: Path, before: OverlapFilter, seed: int, name: str) -> tuple[list[str], list[str]]:
    """Return shared sources and equal texts of a split and of those before it. `name` is that of one of its texts."""
    texts = (
        # texts of two splits may have one continuation, such as yes
        (f"{name} {of.id}", of.source or "", example_keys(of, seed)[0], of.context + of.continuation)
        for of in read_examples_of(path)
    )
    return _overlaps(before, texts)


def overlaps_of_shard(shard: Path, filter_folder: Path, seed: int) -> tuple[list[str], list[str]]:
    """Return shared sources and equal texts of the documents in a file and of the filter's queries and other texts."""
    texts = (
        (f"document {doc.id}", doc.source, piece_key(content_hash(doc.text, seed)), doc.text)
        for doc in read_documents_of(shard)
    )
    return _overlaps(OverlapFilter(filter_folder), texts)


def _overlaps(known: OverlapFilter, texts: Iterable[tuple[str, str, int, str]]) -> tuple[list[str], list[str]]:
    """Compare texts, each with its name, source and key."""
    shared, equal = [], []
    for name, source, key, text in texts:
        if source and overlaps(np.array([hash64(source)], np.uint64), known.sources):
            shared.append(f"{name} and a text of another split both come from source {source}")
        if known.knows_text(key):
            equal.append(f"{name} equals a text of another split or its continuation")
        if known.knows_ngram(text):
            equal.append(f"{name} shares {known.n} words with a text of another split")
    return shared, equal


def require_disjoint(shared_sources: list[str], equal_texts: list[str]) -> None:
    """Raise UserError naming the first overlaps."""
    if overlaps := [*shared_sources, *equal_texts]:
        raise UserError(
            f"corpus, queries and held-out texts overlap in {len(overlaps)} places, so the result would be a leak: "
            f"{'; '.join(overlaps[:3])}{'; ...' if len(overlaps) > 3 else ''}. Remove them from one split"
        )
