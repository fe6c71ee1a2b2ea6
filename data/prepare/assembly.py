"""From sorted runs of pieces to the files of a set: the second half of preparing.

Held-out texts are chosen first, then development texts and queries that overlap none before them, then documents that
overlap no text: what is measured is worth most, and of documents there are most. Each split is the pieces of smallest
keys, in their order.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from replug.data.files import file_sha256, write_json
from replug.data.hashing import hash64
from replug.data.prepare.cutting import SCHEMAS, iterate, read_range
from replug.data.prepare.disjoint import OverlapFilter, prove_examples, write_overlap_filter
from replug.data.prepare.local_pool import Pool
from replug.data.prepare.reading import Cut, SplitSizes
from replug.data.prepare.work import WorkFolder, is_intact
from replug.data.progress import Progress
from replug.data.records import Document, Example
from replug.data.sampling import SPLITS, TEXT_SPLITS, key_ranges
from replug.data.shards import (
    DOCUMENT_SCHEMA,
    read_documents_of,
    read_examples_of,
    token_paths,
    write_examples,
    write_rows,
    write_token_ids,
    write_token_rules,
)
from replug.data.tokenizing import TokenIds, ids_of_texts, load_plain

ROWS_AT_A_TIME = 1000
PIECE_NAMES = {"documents": "document", "queries": "query", "heldout": "held-out text", "dev": "development text"}


@dataclass(frozen=True, slots=True)
class AssemblyRules:
    """What every shard of documents is made from."""

    source_shards: list[str]  # folders of their runs
    duplicates: str  # .npy: hashes of ids that occur twice, and the version that is kept
    overlap_filters: str  # folder
    token_ids: TokenIds | None

    def runs(self, split: str) -> list[Path]:
        return [
            run for source_shard in self.source_shards for run in sorted(Path(source_shard).glob(f"{split}-*.arrow"))
        ]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What became of a range of keys: `kept` pieces, of which the shard holds `rows`."""

    number: int
    kept: int
    rows: int
    dropped: dict[str, int]
    domains: dict[str, int]
    files: dict[str, str]  # names and sha256

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> "ShardReport":
        return ShardReport(**json.loads(path.read_text()))


def write_shard(
    rules_file: Path, out: Path, number: int, keys: tuple[int, int], limit: int | None, mark: Path
) -> ShardReport:
    """Write the documents of a range of keys, at most `limit`, with their token ids; marked when whole."""
    rules, dropped = load_rules(rules_file), Counter[str]()
    overlap_filter = OverlapFilter.load(Path(rules.overlap_filters) / "examples")
    chosen = [
        Document(row["id"], row["text"], row["domain"], row["source"])
        for row in chosen_pieces(rules, "documents", keys, overlap_filter, dropped)
    ]
    kept, chosen = len(chosen), chosen[:limit]
    path = out / f"{number:05d}.arrow"
    write_rows(path, DOCUMENT_SCHEMA, chosen)
    files = [path]
    if rules.token_ids is not None:
        write_ids_of(path, chosen, rules.token_ids)
        files += token_paths(path)
    domains = Counter(doc.domain for doc in chosen)
    hashes = {file.name: file_sha256(file) for file in files}
    report = ShardReport(number, kept, len(chosen), dict(dropped), dict(sorted(domains.items())), hashes)
    report.write(mark)
    return report


def write_ids_of_shard(shard: Path, rule: TokenIds) -> None:
    """Token ids beside the texts of a shard that is there."""
    write_ids_of(shard, list(read_documents_of(shard)), rule)


def write_ids_of(shard: Path, documents: list[Document], rule: TokenIds) -> None:
    tokenizer = _loaded_tokenizer(rule.tokenizer)
    ids = [
        row
        for start in range(0, len(documents), ROWS_AT_A_TIME)
        for row in ids_of_texts(tokenizer, rule, [doc.text for doc in documents[start : start + ROWS_AT_A_TIME]])
    ]
    write_token_ids(shard, ids, rule.dtype)


def choose_examples(
    rules: AssemblyRules,
    split: str,
    ranges: list[tuple[int, int]],
    asked: int,
    overlap_filter: OverlapFilter,
    dropped: Counter,
) -> Iterator[Example]:
    """The first `asked` texts of a split, in the order of their keys."""
    found = 0
    for keys in ranges:
        for row in chosen_pieces(rules, split, keys, overlap_filter, dropped):
            if found == asked:
                return
            found += 1
            yield Example(row["id"], row["context"], row["continuation"], row["domain"], row["source"])


def chosen_pieces(
    rules: AssemblyRules, split: str, keys: tuple[int, int], overlap_filter: OverlapFilter, dropped: Counter
) -> Iterator[dict]:
    """The pieces of a range in order; what repeats another, or is in the overlap filter, is dropped and counted."""
    table = read_range(rules.runs(split), SCHEMAS[split], *keys)
    table = table.filter(is_kept_version(table, np.load(rules.duplicates, mmap_mode="r", allow_pickle=False)))
    what = PIECE_NAMES[split]
    last, last_id = b"", ""
    for row in iterate(table):
        if row["digest"] == last:
            dropped[f"repeated {what}"] += row["id"] != last_id  # the same id: a text that came twice, counted there
            continue
        last, last_id = row["digest"], row["id"]
        if overlap_filter.knows_text(row["key"], row.get("tail")):
            dropped[f"{what} equal to another split's text"] += 1
        elif overlap_filter.knows_ngram(row["text"] if split == "documents" else row["context"] + row["continuation"]):
            dropped[f"{what} that shares {overlap_filter.n} words with another split's text"] += 1
        else:
            yield row


def is_kept_version(table: pa.Table, duplicates: np.ndarray) -> pa.Array:
    """For each row whether its source text is the one that is kept among those of the same id."""
    if not len(duplicates):
        return pa.array(np.ones(len(table), bool))
    ids = np.array([hash64(source) for source in table.column("source").to_pylist()], np.uint64)
    versions = table.column("version").to_numpy()
    places = np.minimum(np.searchsorted(duplicates["id"], ids), len(duplicates) - 1)
    loses = (duplicates["id"][places] == ids) & (duplicates["version"][places] != versions)
    return pa.array(~loses)


def load_rules(path: Path) -> AssemblyRules:
    return _parse_rules(path.read_text())


@lru_cache(1)
def _parse_rules(text: str) -> AssemblyRules:
    row = json.loads(text)
    return AssemblyRules(**{**row, "token_ids": TokenIds(**row["token_ids"]) if row["token_ids"] else None})


PIECES_PER_SHARD = 1 << 14

_loaded_tokenizer = lru_cache(1)(load_plain)  # not those of `cutting`, which do not truncate


def write_assembly_rules(work: WorkFolder, num_source_shards: int, token_ids: TokenIds | None) -> None:
    """What every shard is made from."""
    source_shards = [str(work.source_shard(number)) for number in range(num_source_shards)]
    rules = AssemblyRules(source_shards, str(work.duplicates), str(work.overlap_filters), token_ids)
    write_json(work.assembly, asdict(rules))
    _forget_other_ids(work, token_ids)


def _forget_other_ids(work: WorkFolder, token_ids: TokenIds | None) -> None:
    """Shards that an earlier run wrote with the token ids of another retriever are written again."""
    path, fingerprint = work.documents / "tokens.json", token_ids.fingerprint if token_ids else None
    try:
        before = json.loads(path.read_text())["fingerprint"]
    except (OSError, ValueError):  # damaged; the shards have checksums of their own
        before = None
    for report in [ShardReport.read(mark) for mark in (work.folder / "shards").glob("*.json")]:
        has_ids = len(report.files) > 1
        if has_ids != (fingerprint is not None) or (has_ids and before not in (None, fingerprint)):
            work.shard_mark(report.number).unlink()
    if fingerprint is None:
        path.unlink(missing_ok=True)
    elif before != fingerprint:
        write_token_rules(work.documents, fingerprint)


def write_texts(
    work: WorkFolder, cut: Cut, asked: SplitSizes, dropped: Counter, ngram: int | None, seed: int
) -> tuple[dict[str, dict[str, int]], dict[str, str], tuple[list[str], list[str]]]:
    """Write held-out texts, then splits that overlap none before them, and the filter that documents are held against.

    Returns the numbers of texts of each split by domain, the files with their sha256, and what the proof found: shared
    sources and equal texts.
    """
    rules, overlap_filter = load_rules(work.assembly), OverlapFilter.empty()
    proof: tuple[list[str], list[str]] = ([], [])
    splits = [split for split in TEXT_SPLITS if split in asked.splits]
    paths = {split: work.out / f"{split}.arrow" for split in splits}
    for number, split in enumerate(splits):
        path, made = paths[split], work.folder / f"{split}.arrow"
        write_examples(
            made, choose_examples(rules, split, _ranges(cut, split), getattr(asked, split), overlap_filter, dropped)
        )
        if not path.is_file() or file_sha256(path) != file_sha256(made):  # one that is whole stays as it is
            made.replace(path)
        for found, more in zip(proof, prove_examples(read_examples_of(path), overlap_filter, seed, split), strict=True):
            found += more
        so_far = [paths[before] for before in splits[: number + 1]]
        is_last = number == len(splits) - 1
        folder = work.overlap_filters / ("examples" if is_last else split)
        chosen = (example for path in so_far for example in read_examples_of(path))
        overlap_filter = write_overlap_filter(folder, chosen, ngram, seed)
    named = {split: paths[split] for split in SPLITS if split in paths}
    domains = {split: Counter(example.domain for example in read_examples_of(path)) for split, path in named.items()}
    by_domain = {split: dict(sorted(count.items())) for split, count in domains.items()}
    return by_domain, {path.name: file_sha256(path) for path in named.values()}, proof


def write_shards(work: WorkFolder, cut: Cut, asked: SplitSizes, pool: Pool) -> list[ShardReport]:
    """Shards in the order of their keys until there are enough documents; the last is cut to the number asked for."""
    ranges = _ranges(cut, "documents")
    done = {report.number: report for report in _finished_shards(work)}
    candidates = max(cut.counts["documents"].candidates(), 1)
    needed = len(ranges) if asked.documents is None else -(-asked.documents * len(ranges) // candidates)
    progress = Progress("writing shards of documents", min(len(ranges), needed), len(done))

    def jobs() -> Iterator[tuple]:
        for number, keys in enumerate(ranges):
            if _enough(done, asked.documents):
                return
            if number not in done:
                yield work.assembly, work.documents, number, keys, None, work.shard_mark(number)

    for report in pool.run(write_shard, jobs()):
        done[report.number] = report
        progress.advance(note=f"{sum(report.kept for report in done.values()):,} documents")
    shards = _trimmed(work, done, ranges, asked.documents)
    names = {name for report in shards for name in report.files} | {"tokens.json"}
    for path in work.documents.iterdir():
        if path.name not in names:  # an interrupted run wrote and did not mark it, or it is not needed
            path.unlink()
    return shards


def _finished_shards(work: WorkFolder) -> Iterator[ShardReport]:
    """Reports of shards that need not be written again; a damaged one is named and written again."""
    for mark in sorted((work.folder / "shards").glob("*.json")):
        report = ShardReport.read(mark)
        if is_intact(work.documents, report.files):
            yield report


def _ranges(cut: Cut, split: str) -> list[tuple[int, int]]:
    """Ranges of keys, each with the pieces of about one shard."""
    counts = cut.counts[split]
    return key_ranges(counts.end(), counts.candidates(), PIECES_PER_SHARD)


def _enough(done: dict[int, ShardReport], asked: int | None) -> bool:
    """True where the shards before the first that is missing hold enough."""
    number, kept = 0, 0
    while number in done:
        kept += done[number].kept
        number += 1
    return asked is not None and kept >= asked


def _trimmed(
    work: WorkFolder, done: dict[int, ShardReport], ranges: list[tuple[int, int]], asked: int | None
) -> list[ShardReport]:
    """The shards that are needed, the last of them cut; the others are no longer marked."""
    left = sum(report.kept for report in done.values()) if asked is None else asked
    shards: list[ShardReport] = []
    for number in sorted(done):
        report = done[number]
        rows = min(report.kept, left)
        if rows == 0:
            work.shard_mark(number).unlink()  # its files go with all that are not needed
            continue
        if rows != report.rows:
            mark = work.shard_mark(number)
            report = write_shard(work.assembly, work.documents, number, ranges[number], rows, mark)
        shards.append(report)
        left -= rows
    return shards
