"""From sorted runs of pieces to the files of a set, and the proof that its splits share no text.

Held-out texts are chosen first, then development texts and queries that overlap none before them, then documents that
overlap no text: held-out texts are the most valuable, documents the most plentiful. Each split takes the pieces with
the smallest keys, in their order.

No source document serves two splits, and no text of one split equals a text of another (by content hash, white space
and case aside). All workers map the hashes that a split must not overlap, in sorted files of 8-byte hashes:

    FILTER/keys.u64      every example's whole text and its continuation alone
    FILTER/sources.u64   their sources
    FILTER/ngrams.u64    their n-grams of words, if compared, except n-grams that most sources share
"""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from replug.config.errors import UserError
from replug.data.files import replace_file, write_json, writing
from replug.data.folder import file_sum
from replug.data.prepare.cutting import Rules, iterate, read_range
from replug.data.prepare.reading import Cut, WorkFolder, in_processes
from replug.data.progress import Progress
from replug.data.records import Document, Example
from replug.data.sampling import SPLITS, key_ranges, piece_key
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    in_batches,
    read_documents_of,
    read_examples_of,
    token_paths,
    write_examples,
    write_rows,
    write_token_ids,
    write_token_rules,
)
from replug.data.tokenizing import TokenIds, ids_of_texts
from replug.data.words import common_ngrams, content_hash, hash64, ngram_hashes, overlaps, without_common

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 1000
PIECES_PER_SHARD = 1 << 14
# The sample for common n-grams: whole sources, in the first ranges of keys.
SAMPLED_SOURCES, SAMPLED_RANGES, SAMPLED_NGRAMS = 256, 64, 1 << 24
PIECE_NAMES = {"documents": "document", "queries": "query", "heldout": "held-out text", "dev": "development text"}

NOTHING = np.empty(0, np.uint64)

Overlaps = tuple[list[str], list[str]]  # shared by two splits: sources, and texts or words

# A shard's range of keys: its `number`, pieces `kept`, `rows` written of them, pieces `dropped` by reason, checksums of
# its `files`, and the fingerprint of its token ids (`tokens_by`).
ShardReport = dict[str, Any]


class OverlapFilter:
    """The sorted hashes of a folder, mapped; `n` words make an n-gram, None if n-grams are not compared."""

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
    """Write the hashes of examples, without n-grams that overlap `common` ones (sorted): 8 bytes for each in memory."""

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


def example_keys(example: Example, seed: int = 0) -> tuple[int, int]:
    """Return the keys of a whole text and of its continuation alone, which no document may equal."""
    tail = piece_key(content_hash(example.continuation, seed))
    return piece_key(content_hash(example.context + example.continuation, seed)), tail


def write_sorted(path: Path, hashes: Iterable[np.ndarray]) -> None:
    """Write hashes into one sorted file without repetitions."""
    with writing(path):
        np.unique(np.concatenate([NOTHING, *hashes])).tofile(path)


def overlaps_of_examples(path: Path, before: OverlapFilter, seed: int, name: str) -> Overlaps:
    """Return sources and texts that a split shares with the splits before it. `name` is the noun for its texts."""
    texts = (
        # texts of two splits may share a continuation, such as yes
        (f"{name} {of.id}", of.source or "", example_keys(of, seed)[0], of.context + of.continuation)
        for of in read_examples_of(path)
    )
    return _overlaps(before, texts)


def overlaps_of_shard(shard: Path, filter_folder: Path, seed: int) -> Overlaps:
    """Return sources and texts that the documents of a file share with the examples in the filter."""
    texts = (
        (f"document {doc.id}", doc.source, piece_key(content_hash(doc.text, seed)), doc.text)
        for doc in read_documents_of(shard)
    )
    return _overlaps(OverlapFilter(filter_folder), texts)


def _overlaps(known: "OverlapFilter", texts: Iterable[tuple[str, str, int, str]]) -> Overlaps:
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


# Shards and texts -----------------------------------------------------------------------------------------------------


def write_shard(
    work: WorkFolder, rules: Rules, number: int, keys: tuple[int, int], limit: int | None = None
) -> ShardReport:
    """Write the documents of a range of keys, at most `limit`, with their token ids; marked when whole."""
    dropped, token_ids = Counter[str](), rules.tokenizers.token_ids
    known = OverlapFilter(work.overlap_filter)
    chosen = [
        Document(row["id"], row["text"], row["domain"], row["source"])
        for row in chosen_pieces(work, rules, "documents", keys, known, dropped)
    ]
    kept, chosen = len(chosen), chosen[:limit]
    path = work.documents / f"{number:05d}.arrow"
    write_rows(path, DOCUMENT_SCHEMA, chosen)
    files = [path]
    if token_ids is not None:
        write_ids_of_shard(path, token_ids)
        files += token_paths(path)
    report = {
        "number": number,
        "kept": kept,
        "rows": len(chosen),
        "dropped": dropped,
        "files": {file.name: file_sum(file) for file in files},
        "tokens_by": token_ids and token_ids.fingerprint,
    }
    write_json(work.shards / f"{number:05d}.json", report)
    return report


def write_ids_of_shard(shard: Path, rule: TokenIds) -> None:
    """Write token ids beside the texts of an existing shard."""
    ids: list[np.ndarray] = []
    for documents in in_batches(read_documents_of(shard), ROWS_AT_A_TIME):
        ids += ids_of_texts(rule, [doc.embedded_text for doc in documents])
    write_token_ids(shard, ids, rule.dtype)


def choose_examples(work: WorkFolder, rules: Rules, cut: Cut, split: str, known: OverlapFilter) -> Iterator[Example]:
    """Yield the requested number of texts of a split, smallest keys first."""
    count, requested = 0, cut.requested[split]
    for keys in _ranges(cut, split):
        for row in chosen_pieces(work, rules, split, keys, known, cut.dropped):
            if count == requested:
                return
            count += 1
            yield Example(row["id"], row["text"], row["continuation"], row["domain"], row["source"])


def chosen_pieces(
    work: WorkFolder, rules: Rules, split: str, keys: tuple[int, int], known: OverlapFilter, dropped: Counter
) -> Iterator[dict]:
    """Yield the pieces of a range in order; count and drop repeated pieces and pieces in the overlap filter."""
    table = read_range(work.runs(split), *keys)
    table = table.filter(is_kept_version(table, np.load(work.duplicates, mmap_mode="r", allow_pickle=False)))
    what = PIECE_NAMES[split]
    last, last_id = b"", ""
    for row in iterate(table):
        if row["digest"] == last:
            dropped[f"repeated {what}"] += row["id"] != last_id  # the same id: a text that came twice, counted there
            continue
        last, last_id = row["digest"], row["id"]
        tail = [piece_key(content_hash(row["continuation"], rules.seed))] if row["continuation"] else []
        if known.knows_text(row["key"], *tail):
            dropped[f"{what} equal to another split's text"] += 1
        elif known.knows_ngram(row["text"] + row["continuation"]):
            dropped[f"{what} that shares {known.n} words with another split's text"] += 1
        else:
            yield row


def is_kept_version(table: pa.Table, duplicates: np.ndarray) -> pa.Array:
    """Return for each row whether its source text is the kept version of its id."""
    if not len(duplicates):
        return pa.array(np.ones(len(table), bool))
    ids = np.array([hash64(source) for source in table.column("source").to_pylist()], np.uint64)
    versions = table.column("version").to_numpy()
    places = np.minimum(np.searchsorted(duplicates["id"], ids), len(duplicates) - 1)
    loses = (duplicates["id"][places] == ids) & (duplicates["version"][places] != versions)
    return pa.array(~loses)


def write_texts(
    work: WorkFolder,
    splits: Iterable[str],
    choose: Callable[[str, OverlapFilter], Iterable[Example]],
    seed: int,
    ngram: int | None = None,
    common: np.ndarray = NOTHING,
) -> dict[str, int]:
    """Write splits of texts in order, each filtered by all before it, and the filter that documents must pass.

    Returns the numbers of texts by split. Raises UserError for texts that share words or sources with others.
    """
    known = write_overlap_filter(work.overlap_filter, list, None, seed)
    counts: dict[str, int] = {}

    def written() -> Iterator[Example]:
        return itertools.chain.from_iterable(read_examples_of(work.out / f"{split}.arrow") for split in counts)

    for split in splits:
        examples, path = choose(split, known), work.out / f"{split}.arrow"
        own = {name for of in examples for name in of.own_columns} if isinstance(examples, list) else ()
        counts[split] = write_examples(path, examples, own)
        require_disjoint(*overlaps_of_examples(path, known, seed, PIECE_NAMES[split]))
        known = write_overlap_filter(work.overlap_filter, written, ngram, seed, common)
    return {split: counts[split] for split in SPLITS if split in counts}


def shared_ngrams(work: WorkFolder, cut: Cut, n: int | None) -> np.ndarray:
    """Return the n-grams that most source documents share, estimated from about 256 of them."""
    if n is None:
        return NOTHING
    cutoff = min(2**64 - 1, 2**64 * SAMPLED_SOURCES // max(1, cut.texts))
    by_source: dict[str, list[np.ndarray]] = {}
    num = 0
    for split in cut.requested:
        for keys in _ranges(cut, split)[:SAMPLED_RANGES]:
            table = read_range(work.runs(split), *keys)
            rows = [i for i, of in enumerate(table.column("source").to_pylist()) if hash64(of) <= cutoff]
            for row in iterate(table.take(pa.array(rows, pa.int64()))):
                hashes = ngram_hashes(row["text"] + row["continuation"], n)
                num += len(hashes)
                if num <= SAMPLED_NGRAMS:
                    by_source.setdefault(row["source"], []).append(hashes)
    common = common_ngrams(np.concatenate(own) for own in by_source.values())
    if len(common):
        log.info(f"{len(common):,} runs of {n} words stand in half of the source documents: they count as no overlap")
    return common


def write_shards(work: WorkFolder, rules: Rules, cut: Cut) -> list[ShardReport]:
    """Write shards in the order of their keys until there are enough documents; cut the last to that number."""
    ranges, requested = _ranges(cut, "documents"), cut.requested["documents"]
    token_ids = rules.tokenizers.token_ids
    work.shards.mkdir(exist_ok=True)
    reports = [json.loads(mark.read_text()) for mark in sorted(work.shards.glob("*.json"))]
    done: dict[int, ShardReport] = {
        report["number"]: report
        for report in reports  # an earlier run may have written the token ids of another retriever
        if report["tokens_by"] == (token_ids and token_ids.fingerprint)
    }

    def are_enough() -> bool:
        """Return whether the shards before the first missing one hold enough."""
        first = itertools.takewhile(done.__contains__, itertools.count())
        return requested is not None and sum(done[number]["kept"] for number in first) >= requested

    def jobs() -> Iterator[tuple]:
        for number, keys in enumerate(ranges):
            if are_enough():
                return
            if number not in done:
                yield work, rules, number, keys

    progress = Progress("writing shards of documents", len(ranges), len(done))
    for report in in_processes(write_shard, jobs(), len(ranges)):
        done[report["number"]] = report
        kept = sum(of["kept"] for of in done.values())
        if requested is not None and kept:  # extrapolate the share of dropped pieces to the rest
            expected = -(-requested * len(done) // kept)
            progress.total = min(len(ranges), max(len(done) + (not are_enough()), expected))
        progress.advance(note=f"{kept:,} documents")
    shards: list[ShardReport] = []
    left = sum(report["kept"] for report in done.values()) if requested is None else requested
    for number in sorted(done):
        rows = min(done[number]["kept"], left)
        if rows == 0:
            (work.shards / f"{number:05d}.json").unlink()  # its files are removed below, with all unneeded ones
        else:
            is_whole = rows == done[number]["rows"]
            shards.append(done[number] if is_whole else write_shard(work, rules, number, ranges[number], rows))
        left -= rows
    names = {name for report in shards for name in report["files"]}
    for path in work.documents.iterdir():
        if path.name not in names:  # unmarked after an interruption, or not needed
            path.unlink()
    if token_ids is not None:
        write_token_rules(work.documents, token_ids.fingerprint)
    return shards


def _ranges(cut: Cut, split: str) -> list[tuple[int, int]]:
    """Return ranges of keys, each with the pieces of about one shard."""
    counts = cut.counts[split]
    return key_ranges(counts.end(), counts.candidates(), PIECES_PER_SHARD)
