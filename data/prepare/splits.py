"""Writing the splits of a set out of the runs: held-out texts, development texts, queries, then shards of documents."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from replug.data.files import file_sha256, write_json
from replug.data.prepare.assembly import AssemblyRules, ShardReport, choose_windows, load_rules, write_shard
from replug.data.prepare.disjoint import prove_windows
from replug.data.prepare.local_pool import Pool
from replug.data.prepare.overlap_filter import OverlapFilter, write_overlap_filter
from replug.data.prepare.reading import Cut, SplitSizes
from replug.data.prepare.work import WorkFolder
from replug.data.progress import Progress
from replug.data.records import Window
from replug.data.sampling import SPLITS, TEXT_SPLITS, key_ranges
from replug.data.shards import read_windows_of, write_token_rules, write_windows
from replug.data.tokenizing import TokenIds

PIECES_PER_SHARD = 1 << 14


@dataclass(frozen=True, slots=True)
class Windows:
    """Queries, held-out and development texts as written."""

    counts: dict[str, int]
    domains: dict[str, dict[str, int]]
    files: dict[str, str]
    proof: tuple[list[str], list[str]]  # shared sources, equal texts


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
) -> Windows:
    """Held-out texts, then splits that overlap none before them; and the filter that documents are held against."""
    rules, overlap_filter = load_rules(work.assembly), OverlapFilter.empty()
    proof: tuple[list[str], list[str]] = ([], [])
    splits = [split for split in TEXT_SPLITS if split in asked.splits]
    paths = {split: work.out / f"{split}.arrow" for split in splits}
    for number, split in enumerate(splits):
        path, made = paths[split], work.folder / f"{split}.arrow"
        write_windows(
            made, choose_windows(rules, split, _ranges(cut, split), getattr(asked, split), overlap_filter, dropped)
        )
        if not path.is_file() or file_sha256(path) != file_sha256(made):  # one that is whole stays as it is
            made.replace(path)
        for found, more in zip(proof, prove_windows(read_windows_of(path), overlap_filter, seed, split), strict=True):
            found += more
        so_far = [paths[before] for before in splits[: number + 1]]
        is_last = number == len(splits) - 1
        folder = work.overlap_filters / ("windows" if is_last else split)
        overlap_filter = write_overlap_filter(folder, _windows_of(so_far), ngram, seed)
    named = {split: paths[split] for split in SPLITS if split in paths}
    domains = {split: Counter(window.domain for window in read_windows_of(path)) for split, path in named.items()}
    return Windows(
        {split: count.total() for split, count in domains.items()},
        {split: dict(sorted(count.items())) for split, count in domains.items()},
        {path.name: file_sha256(path) for path in named.values()},
        proof,
    )


def _windows_of(paths: Sequence[Path]) -> Iterator[Window]:
    return (window for path in paths for window in read_windows_of(path))


def write_shards(work: WorkFolder, cut: Cut, asked: SplitSizes, pool: Pool) -> list[ShardReport]:
    """Shards in the order of their keys until there are enough documents; the last is cut to the number asked for."""
    ranges = _ranges(cut, "documents")
    done = {report.number: report for report in work.finished_shards()}
    progress = Progress("writing shards of documents", _num_needed(cut, ranges, asked.documents), len(done))

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
    _remove_others(work, shards)
    return shards


def _ranges(cut: Cut, split: str) -> list[tuple[int, int]]:
    """Ranges of keys, each with the pieces of about one shard."""
    counts = cut.counts[split]
    return key_ranges(counts.end(), counts.candidates(), PIECES_PER_SHARD)


def _num_needed(cut: Cut, ranges: list[tuple[int, int]], asked: int | None) -> int:
    """About how many shards there will be."""
    candidates = max(cut.counts["documents"].candidates(), 1)
    return len(ranges) if asked is None else min(len(ranges), -(-asked * len(ranges) // candidates))


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


def _remove_others(work: WorkFolder, shards: Sequence[ShardReport]) -> None:
    """What an interrupted run wrote and did not mark, and what is not needed now."""
    names = {name for report in shards for name in report.files} | {"tokens.json"}
    for path in work.documents.iterdir():
        if path.name not in names:
            path.unlink()
