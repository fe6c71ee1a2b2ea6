"""From sorted runs of pieces to the files of a set: the second half of preparing.

Held-out texts are chosen first, then development texts and queries that overlap none before them, then documents that
overlap no text: what is measured is worth most, and of documents there are most. Each split is the pieces of smallest
keys, in their order.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from replug.data.files import write_json
from replug.data.folder import FileSum, file_sum
from replug.data.prepare.cutting import SCHEMAS, iterate, load_rules, read_range
from replug.data.prepare.disjoint import (
    NOTHING,
    OverlapFilter,
    common_ngrams,
    prove_examples,
    write_overlap_filter,
)
from replug.data.prepare.reading import Cut
from replug.data.prepare.work import LocalPool, WorkFolder, is_intact
from replug.data.progress import Progress
from replug.data.records import Document, Example
from replug.data.sampling import SPLITS, TEXT_SPLITS, key_ranges
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    TOKEN_RULES,
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
from replug.data.words import hash64, ngram_hashes

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 1000
# Where n-grams that most sources share are looked for: whole sources, in the first ranges of keys.
SAMPLED_SOURCES, SAMPLED_RANGES, SAMPLED_NGRAMS = 256, 64, 1 << 24
PIECE_NAMES = {"documents": "document", "queries": "query", "heldout": "held-out text", "dev": "development text"}


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The outcome of a range of keys: `kept` pieces, of which the shard holds `rows`."""

    number: int
    kept: int
    rows: int
    dropped: dict[str, int]
    domains: dict[str, int]
    files: dict[str, FileSum]


def write_shard(work: WorkFolder, number: int, keys: tuple[int, int], limit: int | None = None) -> ShardReport:
    """Write the documents of a range of keys, at most `limit`, with their token ids; marked when whole."""
    dropped, token_ids = Counter[str](), load_rules(work).tokenizers.token_ids
    overlap_filter = OverlapFilter.load(work.overlap_filter)
    chosen = [
        Document(row["id"], row["text"], row["domain"], row["source"])
        for row in chosen_pieces(work, "documents", keys, overlap_filter, dropped)
    ]
    kept, chosen = len(chosen), chosen[:limit]
    path = work.documents / f"{number:05d}.arrow"
    write_rows(path, DOCUMENT_SCHEMA, chosen)
    files = [path]
    if token_ids is not None:
        write_ids_of_shard(path, token_ids)
        files += token_paths(path)
    domains = Counter(doc.domain for doc in chosen)
    sums = {file.name: file_sum(file) for file in files}
    report = ShardReport(number, kept, len(chosen), dict(dropped), dict(sorted(domains.items())), sums)
    write_json(work.shard_mark(number), asdict(report))
    return report


def write_ids_of_shard(shard: Path, rule: TokenIds) -> None:
    """Write token ids beside the texts of a shard that is there."""
    ids: list[np.ndarray] = []
    for documents in in_batches(read_documents_of(shard), ROWS_AT_A_TIME):
        ids += ids_of_texts(rule, [doc.embedded_text for doc in documents])
    write_token_ids(shard, ids, rule.dtype)


def choose_examples(
    work: WorkFolder, cut: Cut, split: str, dropped: Counter, overlap_filter: OverlapFilter
) -> Iterator[Example]:
    """Yield the first texts of a split, as many as are requested, in the order of their keys."""
    count, requested = 0, cut.requested[split]
    for keys in _ranges(cut, split):
        for row in chosen_pieces(work, split, keys, overlap_filter, dropped):
            if count == requested:
                return
            count += 1
            yield Example(row["id"], row["context"], row["continuation"], row["domain"], row["source"])


def chosen_pieces(
    work: WorkFolder, split: str, keys: tuple[int, int], overlap_filter: OverlapFilter, dropped: Counter
) -> Iterator[dict]:
    """Yield the pieces of a range in order; count and drop what repeats another or is in the overlap filter."""
    table = read_range(work.runs(split), SCHEMAS[split], *keys)
    table = table.filter(is_kept_version(table, np.load(work.duplicates, mmap_mode="r", allow_pickle=False)))
    what = PIECE_NAMES[split]
    last, last_id = b"", ""
    for row in iterate(table):
        if row["digest"] == last:
            dropped[f"repeated {what}"] += row["id"] != last_id  # the same id: a text that came twice, counted there
            continue
        last, last_id = row["digest"], row["id"]
        if overlap_filter.knows_text(row["key"], *([row["tail"]] if "tail" in row else [])):
            dropped[f"{what} equal to another split's text"] += 1
        elif overlap_filter.knows_ngram(row["text"] if split == "documents" else row["context"] + row["continuation"]):
            dropped[f"{what} that shares {overlap_filter.n} words with another split's text"] += 1
        else:
            yield row


def is_kept_version(table: pa.Table, duplicates: np.ndarray) -> pa.Array:
    """Return for each row whether its source text is the version that is kept of its id."""
    if not len(duplicates):
        return pa.array(np.ones(len(table), bool))
    ids = np.array([hash64(source) for source in table.column("source").to_pylist()], np.uint64)
    versions = table.column("version").to_numpy()
    places = np.minimum(np.searchsorted(duplicates["id"], ids), len(duplicates) - 1)
    loses = (duplicates["id"][places] == ids) & (duplicates["version"][places] != versions)
    return pa.array(~loses)


PIECES_PER_SHARD = 1 << 14


def forget_other_ids(work: WorkFolder, token_ids: TokenIds | None) -> None:
    """Have shards written again that an earlier run wrote with the token ids of another retriever."""
    path, fingerprint = work.documents / TOKEN_RULES, token_ids.fingerprint if token_ids else None
    try:
        before = json.loads(path.read_text())["fingerprint"]
    except (OSError, ValueError):
        before = None
    if before == fingerprint and path.is_file() == (fingerprint is not None):
        return
    for mark in work.path.glob("shards/*.json"):
        mark.unlink()
    if fingerprint is None:
        path.unlink(missing_ok=True)
    else:
        write_token_rules(work.documents, fingerprint)


Texts = Mapping[str, Callable[[OverlapFilter], Iterable[Example]]]  # by split, without what the filter knows


def write_texts(
    work: WorkFolder, texts: Texts, seed: int, ngram: int | None = None, common: np.ndarray = NOTHING
) -> tuple[dict[str, dict[str, int]], tuple[list[str], list[str]]]:
    """Write splits of texts in order, each after the filter of those before, and the filter that documents must pass.

    Returns the numbers of texts of each split by domain, and what the proof shows: shared sources and equal texts.
    """
    overlap_filter = write_overlap_filter(work.overlap_filter, (), None, seed)
    proof: tuple[list[str], list[str]] = ([], [])
    paths: dict[str, Path] = {}
    for split, choose in texts.items():
        examples, path = choose(overlap_filter), work.out / f"{split}.arrow"
        own = {name for of in examples for name in of.own_columns} if isinstance(examples, list) else ()
        write_examples(path, examples, own)
        overlaps = prove_examples(read_examples_of(path), overlap_filter, seed, PIECE_NAMES[split])
        for known, more in zip(proof, overlaps, strict=True):
            known += more
        paths[split] = path
        written = (example for before in paths.values() for example in read_examples_of(before))
        overlap_filter = write_overlap_filter(work.overlap_filter, written, ngram, seed, common)
    domains = {split: Counter(example.domain for example in read_examples_of(path)) for split, path in paths.items()}
    return {split: dict(sorted(domains[split].items())) for split in SPLITS if split in domains}, proof


def chosen_texts(work: WorkFolder, cut: Cut, dropped: Counter) -> Texts:
    """Return the splits of texts that are requested of a cut source, in the order in which they are chosen."""
    splits = [split for split in TEXT_SPLITS if split in cut.requested]
    return {split: partial(choose_examples, work, cut, split, dropped) for split in splits}


def own_texts(examples: Mapping[str, list[Example]]) -> Texts:
    """Return the user's own texts. None is dropped, and no document for words that it shares with one.

    A question may quote the document that answers it.
    """
    return {split: lambda _, of=of: of for split, of in examples.items()}  # type: ignore[misc]


def shared_ngrams(work: WorkFolder, cut: Cut, n: int | None) -> np.ndarray:
    """Return the n-grams that most of the source documents share, as some hundred of them show."""
    if n is None:
        return NOTHING
    cutoff = min(2**64 - 1, 2**64 * SAMPLED_SOURCES // max(1, cut.texts))
    by_source: dict[str, list[np.ndarray]] = {}
    num = 0
    for split in cut.requested:
        for keys in _ranges(cut, split)[:SAMPLED_RANGES]:
            table = read_range(work.runs(split), SCHEMAS[split], *keys)
            rows = [i for i, of in enumerate(table.column("source").to_pylist()) if hash64(of) <= cutoff]
            for row in iterate(table.take(pa.array(rows, pa.int64()))):
                hashes = ngram_hashes(row["text"] if split == "documents" else row["context"] + row["continuation"], n)
                num += len(hashes)
                if num <= SAMPLED_NGRAMS:
                    by_source.setdefault(row["source"], []).append(hashes)
    common = common_ngrams(np.concatenate(own) for own in by_source.values())
    if len(common):
        log.info(f"{len(common):,} runs of {n} words stand in half of the source documents: they count as no overlap")
    return common


def write_shards(work: WorkFolder, cut: Cut, pool: LocalPool) -> list[ShardReport]:
    """Write shards in the order of their keys until there are enough documents; cut the last to that number."""
    ranges, requested = _ranges(cut, "documents"), cut.requested["documents"]
    reports = [ShardReport(**json.loads(mark.read_text())) for mark in sorted(work.path.glob("shards/*.json"))]
    done = {report.number: report for report in reports if is_intact(work.documents, report.files)}
    candidates = max(cut.counts["documents"].candidates(), 1)
    needed = len(ranges) if requested is None else -(-requested * len(ranges) // candidates)
    progress = Progress("writing shards of documents", min(len(ranges), needed), len(done))

    def jobs() -> Iterator[tuple]:
        for number, keys in enumerate(ranges):
            if _enough(done, requested):
                return
            if number not in done:
                yield work, number, keys

    for report in pool.run(write_shard, jobs()):
        done[report.number] = report
        kept = sum(report.kept for report in done.values())
        if requested is not None and kept:  # a share of the pieces is dropped: the rest is taken to be alike
            expected = -(-requested * len(done) // kept)
            progress.total = min(len(ranges), max(len(done) + (not _enough(done, requested)), expected))
        progress.advance(note=f"{kept:,} documents")
    shards = _trimmed(work, done, ranges, requested)
    names = {name for report in shards for name in report.files} | {TOKEN_RULES}
    for path in work.documents.iterdir():
        if path.name not in names:  # an interrupted run wrote and did not mark it, or it is not needed
            path.unlink()
    return shards


def _ranges(cut: Cut, split: str) -> list[tuple[int, int]]:
    """Return ranges of keys, each with the pieces of about one shard."""
    counts = cut.counts[split]
    return key_ranges(counts.end(), counts.candidates(), PIECES_PER_SHARD)


def _enough(done: dict[int, ShardReport], requested: int | None) -> bool:
    """Return whether the shards before the first that is missing hold enough."""
    number, kept = 0, 0
    while number in done:
        kept += done[number].kept
        number += 1
    return requested is not None and kept >= requested


def _trimmed(
    work: WorkFolder, done: dict[int, ShardReport], ranges: list[tuple[int, int]], requested: int | None
) -> list[ShardReport]:
    """Return the shards that are needed, the last of them cut. The others lose their marks."""
    left = sum(report.kept for report in done.values()) if requested is None else requested
    shards: list[ShardReport] = []
    for number in sorted(done):
        report = done[number]
        rows = min(report.kept, left)
        if rows == 0:
            work.shard_mark(number).unlink()  # its files go with all that are not needed
            continue
        if rows != report.rows:
            report = write_shard(work, number, ranges[number], rows)
        shards.append(report)
        left -= rows
    return shards
