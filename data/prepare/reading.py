"""Reading a source: the workers of a pool cut its source shards, and what all of them gave is added up.

Of texts with one id one keeps it, which follows from its words and not its place. The registers of texts are sorted, so
that a range of hashes is read from all of them at once and memory does not grow with the source.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.files import replace_file, writing
from replug.data.prepare.cutting import REGISTRY, SourceShardReport, cut_source_shard
from replug.data.prepare.work import LocalPool, WorkFolder, is_intact
from replug.data.progress import Progress
from replug.data.sampling import SPLITS, TEXT_SPLITS, KeyCounts
from replug.data.sources.records import EXAMPLES, Reason, Rejected, SourceShard, readable_name

log = logging.getLogger(__name__)

ENOUGH_ROWS = 10_000  # rows after which the share is judged while the source is still being read
NOTHING_TO_READ = (Reason.no_main_text, Reason.empty_file)  # pages of links, `__init__.py`: no damage
LEAST_TEXTS = 1 << 14  # pieces that are kept of a split of texts: most of a few may repeat one another
SHOWN = 3  # texts in a warning; rejected.jsonl has more
Requested = dict[str, int | None]  # requested pieces by split; None means all. Other splits are not made.


class Cut:
    """The reports of all source shards, added up as they come in."""

    def __init__(self, source_shards: Sequence[SourceShard], requested: Requested, margin: int) -> None:
        self.source_shards, self.requested = source_shards, requested
        self.reports: dict[int, SourceShardReport] = {}  # without their counts of keys, of which only the sums are kept
        self.counts = {
            split: KeyCounts(requested.get(split, 0), margin, LEAST_TEXTS * (split in TEXT_SPLITS)) for split in SPLITS
        }
        self.domains: dict[str, Counter] = {split: Counter() for split in SPLITS}
        self.dropped, self.rejected = Counter[str](), Counter[str]()
        self.texts = self.tokens = self.cut_further = 0

    def add(self, report: SourceShardReport) -> None:
        self.reports[report.number] = replace(report, counts={}, domains={})
        self.texts += report.texts
        self.tokens += report.tokens
        self.cut_further += report.cut_further
        self.dropped.update(report.dropped)
        self.rejected.update(report.rejected)
        for split in SPLITS:
            self.counts[split].add(report.counts[split])
            self.domains[split].update(report.domains[split])

    def limits(self) -> dict[str, int]:
        """Return the buckets of keys above which a piece can no longer be among the requested ones."""
        return {split: self.counts[split].limit for split in SPLITS}

    def left_out(self, split: str) -> bool:
        """Return whether pieces of a split were not kept, for want of a chance to be among the requested ones."""
        return self.counts[split].candidates() < self.counts[split].total()

    def absolute(self, source_shard: int, line: int) -> int:
        """Return a line of a source shard as the file counts it; 0 stays 0."""
        names = self.source_shards[source_shard].names
        while line and source_shard and self.source_shards[source_shard - 1].names == names:
            source_shard -= 1
            line += self.reports[source_shard].lines
        return line

    def examples(self) -> Iterator[Rejected]:
        """Yield the listed cases in the order of the files; lines are counted as far as the shards before are known."""
        known = True
        for source_shard in self.source_shards:
            known = known and source_shard.number in self.reports
            if (report := self.reports.get(source_shard.number)) is not None:
                for case in report.examples:
                    yield replace(case, line=self.absolute(source_shard.number, case.line)) if known else case


def cut_source(
    work: WorkFolder, source_shards: Sequence[SourceShard], requested: Requested, pool: LocalPool, max_rejected: float
) -> Cut:
    """Cut every source shard, apart from those that an interrupted run cut.

    Raises UserError if more than a share `max_rejected` of the source was rejected.
    """
    cut = Cut(source_shards, requested, work.margin)
    for number in range(len(source_shards)):
        folder = work.source_shard(number)
        if (mark := folder / "report.json").is_file():
            report = SourceShardReport.read(mark)
            if is_intact(folder, report.files):  # a damaged one is named and cut again
                cut.add(report)
    progress = Progress("cutting the source", len(source_shards), len(cut.reports))
    todo = [source_shard for source_shard in source_shards if source_shard.number not in cut.reports]
    jobs = ((work, source_shard, cut.limits()) for source_shard in todo)  # limits as they are by then
    for report in pool.run(cut_source_shard, jobs):
        cut.add(report)
        progress.advance(note=f"{cut.texts:,} texts, {cut.tokens:,} tokens")
        if cut.texts >= ENOUGH_ROWS and _too_many(cut, max_rejected):
            break
    _require_few(work, cut, cut.examples(), max_rejected)
    _reject_duplicates(work, cut, max_rejected)
    return cut


def _too_many(cut: Cut, limit: float) -> bool:
    """Return whether more than a share `limit` of all rows was rejected, beside files that hold nothing to read."""
    rejected = cut.rejected.total() - sum(cut.rejected[reason] for reason in NOTHING_TO_READ)
    return rejected > limit * (cut.texts + rejected)


def _require_few(work: WorkFolder, cut: Cut, examples: Iterable[Rejected], max_rejected: float) -> None:
    """Write `rejected.jsonl`; raises UserError with the first cases where it holds too much."""
    if not cut.rejected:
        return
    path, listed, rejected = work.out / "rejected.jsonl", list(examples), cut.rejected.total()
    write_rejected(path, listed)
    if _too_many(cut, max_rejected):
        first_of: dict[str, Rejected] = {}
        for case in listed:
            first_of.setdefault(case.reason.value, case)
        raise UserError(
            f"{rejected} of {cut.texts + rejected} rows of data.source were rejected, more than "
            f"data.max_rejected_share={max_rejected:g} allows: {'; '.join(map(str, list(first_of.values())[:3]))}. "
            f"Counts: {dict(cut.rejected)}; the first of each are listed in {path}"
        )
    first = "; ".join([*map(str, listed[:SHOWN]), *(["..."] if listed[SHOWN:] else [])])
    log.warning(f"{path} lists texts that could not be read ({rejected:,}): {first}")


def write_rejected(path: Path, examples: Iterable[Rejected]) -> None:
    """Write `rejected.jsonl`: the first hundred of each reason, in the order of the files."""
    listed: Counter[str] = Counter()
    lines = []
    for case in examples:
        listed[case.reason.value] += 1
        if listed[case.reason.value] <= EXAMPLES:
            row = {
                "reason": case.reason.value,
                "file": readable_name(case.file),
                "line": case.line or None,
                "detail": case.detail,
            }
            lines.append(json.dumps(row, ensure_ascii=True))
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def _reject_duplicates(work: WorkFolder, cut: Cut, max_rejected: float) -> None:
    """Reject texts with another text's id, and count repeated texts without an id."""
    folders = [work.source_shard(source_shard.number) for source_shard in cut.source_shards]
    named, unnamed, places = find_duplicates(folders, cut.texts, work.duplicates)
    if named:
        detail = "another text has this id; data.fields={NAME: id} must name a field that tells all texts apart"
        cases = [
            Rejected(Reason.duplicate_id, cut.source_shards[number].names[0], cut.absolute(number, line), detail)
            for number, line in places
        ]
        cut.rejected["duplicate_id"] = named
        _require_few(work, cut, [*cut.examples(), *cases], max_rejected)
    if unnamed:
        cut.dropped["repeated text"] = unnamed


KEPT = np.dtype([("id", np.uint64), ("version", np.uint64)])
TEXTS_AT_A_TIME = 1 << 20


def find_duplicates(folders: Sequence[Path], num_texts: int, out: Path) -> tuple[int, int, list[tuple[int, int]]]:
    """Write `out`: the version kept of each id that occurs twice.

    Returns how many texts came again under an id that was given, how many without one (their words are their id), and
    source shard and line of the first hundred of the former.
    """
    registers = [(number, path) for number, folder in enumerate(folders) for path in sorted(folder.glob("texts-*.npy"))]
    number = max(1, -(-num_texts // TEXTS_AT_A_TIME))
    kept, places, again = [], [], [0, 0]
    for part in range(number):
        low, high = 2**64 * part // number, 2**64 * (part + 1) // number
        rows = _rows_between(registers, low, high)
        repeated = np.flatnonzero(rows["id"][1:] == rows["id"][:-1]) + 1
        ids = np.unique(rows["id"][repeated])
        first = np.empty(len(ids), KEPT)  # versions: rows are sorted
        first["id"], first["version"] = ids, rows["version"][np.searchsorted(rows["id"], ids)]
        kept.append(first)
        named = rows["named"][repeated]
        again[0] += int(named.sum())
        again[1] += int((~named).sum())
        places += [(int(row["source_shard"]), int(row["line"])) for row in rows[repeated[named]]]
        places = sorted(places)[:EXAMPLES]
    with writing(out):
        np.save(out, np.concatenate(kept), allow_pickle=False)
    return again[0], again[1], places


def _rows_between(registers: list[tuple[int, Path]], low: int, high: int) -> np.ndarray:
    """Return the rows of all registers with low <= id < high, sorted by id, version, source shard and line."""
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
