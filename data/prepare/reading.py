"""Reading a source: its units cut by the workers of a pool, and what all of them gave added up."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from replug.data.prepare.cutting import UnitReport, cut_unit
from replug.data.prepare.duplicates import find_duplicates, rejected_duplicates
from replug.data.prepare.local_pool import Pool
from replug.data.prepare.work import Work
from replug.data.progress import format_duration, say
from replug.data.sampling import SIDES, KeyCounts
from replug.data.sources.rejected import ENOUGH_ROWS, Rejected, require_few_rejected, too_many, write_rejected
from replug.data.sources.shards import Unit


@dataclass(frozen=True, slots=True)
class Asked:
    """How many of each side; None is all."""

    documents: int | None
    queries: int | None
    heldout: int | None


class Cut:
    """What all units gave, added up as they come in."""

    def __init__(self, units: Sequence[Unit], asked: Asked, margin: int) -> None:
        self.units = units
        self.reports: dict[int, UnitReport] = {}  # without their counts of keys, of which only the sums are kept
        self.counts = {side: KeyCounts(getattr(asked, side), margin) for side in SIDES}
        self.domains: dict[str, Counter] = {side: Counter() for side in SIDES}
        self.dropped, self.rejected = Counter[str](), Counter[str]()
        self.texts = self.tokens = 0

    def add(self, report: UnitReport) -> None:
        self.reports[report.number] = replace(report, counts={}, domains={})
        self.texts += report.texts
        self.tokens += report.tokens
        self.dropped.update(report.dropped)
        self.rejected.update(report.rejected)
        for side in SIDES:
            self.counts[side].add(report.counts[side])
            self.domains[side].update(report.domains[side])

    def limits(self) -> dict[str, int]:
        """Buckets of keys above which a piece can no longer be among those asked for."""
        return {side: self.counts[side].limit for side in SIDES}

    def left_out(self, side: str) -> bool:
        """True where pieces of this side were not kept, for want of a chance to be among those asked for."""
        return self.counts[side].candidates() < self.counts[side].total()

    def absolute(self, unit: int, line: int) -> int:
        """A line counted from its unit's first, as the file counts it; 0 stays 0."""
        before = 0
        while line and unit and self.units[unit - 1].names == self.units[unit].names:
            unit -= 1
            before += self.reports[unit].lines
        return line + before

    def examples(self) -> Iterator[Rejected]:
        """The listed cases in the order of the files; their lines are counted as far as the units before are known."""
        known = True
        for unit in self.units:
            known = known and unit.number in self.reports
            for case in self.reports[unit.number].examples if unit.number in self.reports else ():
                yield replace(case, line=self.absolute(unit.number, case.line)) if known else case


def cut_source(work: Work, units: Sequence[Unit], asked: Asked, pool: Pool, max_rejected: float) -> Cut:
    """Every unit cut, those of an interrupted run included."""
    cut, progress = Cut(units, asked, work.margin), CutProgress(units)
    for report in work.finished_units(len(units)):
        cut.add(report)
        progress.advance(report, before=True)
    todo = [unit for unit in units if unit.number not in cut.reports]
    jobs = ((work.rules, work.unit(unit.number), unit, cut.limits()) for unit in todo)  # limits as they are by then
    for report in pool.run(cut_unit, jobs):
        cut.add(report)
        progress.advance(report)
        if cut.texts >= ENOUGH_ROWS and too_many(cut.rejected, cut.texts, max_rejected):
            break
    _require_few(work, cut, cut.examples(), max_rejected)
    return cut


def _require_few(work: Work, cut: Cut, examples: Iterable[Rejected], max_rejected: float) -> None:
    """Write `rejected.jsonl`; raises UserError where it holds too much."""
    if cut.rejected:
        path, listed = work.out / "rejected.jsonl", list(examples)
        write_rejected(path, listed)
        require_few_rejected(cut.rejected, listed, cut.texts, max_rejected, path)


def reject_duplicates(work: Work, cut: Cut, max_rejected: float) -> None:
    """Reject texts whose id another has, and count those without an id that occur again."""
    folders = [work.unit(unit.number) for unit in cut.units]
    named, unnamed, places = find_duplicates(folders, cut.texts, work.duplicates)
    if named:
        lines = [(unit, cut.absolute(unit, line)) for unit, line in places]
        cases = rejected_duplicates(lines, [unit.names[0] for unit in cut.units])
        cut.rejected["duplicate_id"] = named
        _require_few(work, cut, [*cut.examples(), *cases], max_rejected)
    if unnamed:
        cut.dropped["repeated text"] = unnamed


class CutProgress:
    """Texts, tokens, rate and time left; by bytes where the source says how many it has."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._sizes = [unit.size for unit in units] if all(unit.size for unit in units) else [1] * len(units)
        self._texts = self._tokens = self._done = self._before = self._tokens_before = 0
        self._start = self._last = time.monotonic()

    def advance(self, report: UnitReport, before: bool = False) -> None:
        """Count a unit; `before` says that an earlier run cut it."""
        self._texts += report.texts
        self._tokens += report.tokens
        self._done += self._sizes[report.number]
        if before:
            self._before, self._tokens_before = self._done, self._tokens
        now = time.monotonic()
        if now - self._last > 5 or self._done == sum(self._sizes):
            self._last = now
            self._say(max(now - self._start, 1e-9))

    def _say(self, seconds: float) -> None:
        total, since = sum(self._sizes), max(self._done - self._before, 1)
        left = seconds / since * (total - self._done)
        rate = (self._tokens - self._tokens_before) / seconds
        say(
            f"cutting the source: {100 * self._done / total:.0f}% · {self._texts:,} texts · {self._tokens:,} tokens · "
            f"{rate:,.0f} tokens/s · {format_duration(left)} left"
        )
