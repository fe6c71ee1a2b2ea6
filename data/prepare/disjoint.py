"""The proof that what is retrieved, what is trained on and what is measured share no text.

No source document serves two splits, and no text of one split equals a text of another (by content hash, white space
and case aside). The examples' hashes are held in memory and the corpus streams past.

What a split must not overlap lies in sorted files of hashes that all workers map, 8 bytes each, so that 800K texts take
20 MB, and 1 GB more with their 13-grams:

    FILTER/keys.u64      every example's whole text and its continuation alone
    FILTER/sources.u64   what they were cut from
    FILTER/ngrams.u64    their n-grams of words, where these are compared
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.files import replace_file, writing
from replug.data.hashing import content_hash, hash64, ngram_hashes, overlaps
from replug.data.records import Document, Example
from replug.data.sampling import piece_key
from replug.data.shards import read_documents_of

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


def write_overlap_filter(folder: Path, examples: Iterable[Example], n: int | None, seed: int) -> OverlapFilter:
    """Write the hashes of examples; memory does not grow with their number."""
    folder.mkdir(parents=True, exist_ok=True)
    keys, sources, ngrams = (SortedHashes(folder / f"{name}.u64") for name in ("keys", "sources", "ngrams"))
    for example in examples:
        keys.add(np.array(example_keys(example, seed), np.uint64))
        sources.add(np.array([hash64(example.source or "")], np.uint64))
        if n is not None:
            ngrams.add(ngram_hashes(example.context + example.continuation, n))
    for hashes in (keys, sources, ngrams):
        hashes.finish()
    replace_file(folder / "n", str(n or 0).encode())
    return OverlapFilter.load(folder)


def example_keys(example: Example, seed: int) -> tuple[int, int]:
    """What a document must not equal: the whole text, and the continuation that is to be predicted."""
    texts = (example.context + example.continuation, example.continuation)
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


@dataclass(frozen=True)
class DisjointProof:
    """Counts of what was compared and what overlapped; every overlap is listed by its ids."""

    num_documents: int
    num_queries: int
    num_heldout: int
    shared_sources: tuple[str, ...] = field(default=())
    equal_texts: tuple[str, ...] = field(default=())
    num_dev: int = 0
    ngram: int | None = None  # words of an n-gram that no document shares with a text, where this was compared

    @property
    def holds(self) -> bool:
        return not self.shared_sources and not self.equal_texts

    def to_json(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"disjoint: {self.num_documents} documents, {self.num_queries} queries, {self.num_heldout} held-out"
            + (f", {self.num_dev} development texts" if self.num_dev else "")
            + f"; {len(self.shared_sources)} shared sources, {len(self.equal_texts)} equal texts"
            + (f" or {self.ngram} words in common" if self.ngram else "")
        )


def example_hashes(example: Example) -> tuple[bytes, bytes]:
    """What a document must not equal: the whole text, and the continuation that is to be predicted."""
    return content_hash(example.context + example.continuation), content_hash(example.continuation)


def prove_disjoint(
    documents: Iterable[Document], queries: Sequence[Example], heldout: Sequence[Example], dev: Sequence[Example] = ()
) -> DisjointProof:
    """Compare every split with every other; documents are iterated once."""
    examples = [*queries, *heldout, *dev]
    by_source = {example.source: example.id for example in examples if example.source}
    by_text = {digest: example.id for example in examples for digest in example_hashes(example)}
    shared, equal = _between_examples(queries, heldout, ("query", "held-out text"))
    for others, name in ((queries, "query"), (heldout, "held-out text")):
        for found, more in zip(
            (shared, equal), _between_examples(others, dev, (name, "development text")), strict=True
        ):
            found += more
    count = 0
    for doc in documents:
        count += 1
        if doc.source in by_source:
            shared.append(f"document {doc.id} and text {by_source[doc.source]} both come from source {doc.source}")
        if (other := by_text.get(content_hash(doc.text))) is not None:
            equal.append(f"document {doc.id} equals text {other} or its continuation")
    return DisjointProof(count, len(queries), len(heldout), tuple(shared), tuple(equal), len(dev))


def prove_examples(
    examples: Iterable[Example], before: OverlapFilter, seed: int, split: str = "queries"
) -> tuple[list[str], list[str]]:
    """Shared sources and equal texts of a split and what the overlap filter knows of those chosen before it."""
    shared, equal = [], []
    name, other = {"queries": "query"}.get(split, f"{split} text"), "a held-out or development text"
    for example in examples:
        if before.knows_source(example.source or ""):
            shared.append(f"{name} {example.id} and {other} both come from source {example.source}")
        if before.knows_text(*example_keys(example, seed)):
            equal.append(f"{name} {example.id} equals {other} or its continuation")
        if before.knows_ngram(example.context + example.continuation):
            equal.append(f"{name} {example.id} shares {before.n} words with {other}")
    return shared, equal


def prove_shard(shard: Path, filter_folder: Path, seed: int) -> tuple[list[str], list[str]]:
    """Shared sources and equal texts of the documents in a file and the overlap filter's queries and held-out texts."""
    overlap_filter = OverlapFilter.load(filter_folder)
    shared, equal = [], []
    for doc in read_documents_of(shard):
        if overlap_filter.knows_source(doc.source):
            shared.append(f"document {doc.id} and a query or held-out text both come from source {doc.source}")
        if overlap_filter.knows_text(piece_key(content_hash(doc.text, seed))):
            equal.append(f"document {doc.id} equals a query, a held-out text or its continuation")
        if overlap_filter.knows_ngram(doc.text):
            equal.append(f"document {doc.id} shares {overlap_filter.n} words with a query or held-out text")
    return shared, equal


def require_disjoint(proof: DisjointProof) -> None:
    """Raise UserError naming the first overlaps."""
    if not proof.holds:
        overlaps = [*proof.shared_sources, *proof.equal_texts]
        raise UserError(
            f"corpus, queries and held-out texts overlap in {len(overlaps)} places, so the result would be a leak: "
            f"{'; '.join(overlaps[:3])}{'; ...' if len(overlaps) > 3 else ''}. Remove them from one split"
        )


def require_examples_apart(
    queries: Iterable[Example], heldout: Iterable[Example], names: tuple[str, str] = ("training", "held-out")
) -> None:
    """Raise UserError naming the first training texts that are held-out texts too, or come from a source of theirs.

    The held-out texts' hashes are held in memory and the queries stream past. `names` says what else they are.
    """
    measured = list(heldout)
    sources = {example.source for example in measured if example.source}
    texts = {example_hashes(example)[0] for example in measured}
    found = [f"text {query.id}" for query in queries if query.source in sources or example_hashes(query)[0] in texts]
    if found:
        named = f"{', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"
        raise UserError(
            f"{len(found)} {names[0]} texts are {names[1]} texts, or come from a source of theirs, so the result would "
            f"be a leak: {named}. Was a file of the set replaced? Prepare it again"
        )


def _between_examples(
    first: Sequence[Example], second: Sequence[Example], names: tuple[str, str]
) -> tuple[list[str], list[str]]:
    sources = {example.source: example.id for example in first if example.source}
    texts = {example_hashes(example)[0]: example.id for example in first}
    shared = [
        f"{names[0]} {sources[example.source]} and {names[1]} {example.id} both come from source {example.source}"
        for example in second
        if example.source in sources
    ]
    equal = [
        f"{names[0]} {texts[digest]} equals {names[1]} {example.id}"
        for example in second
        if (digest := example_hashes(example)[0]) in texts
    ]
    return shared, equal
