"""Read a source: the workers of a pool cut its source shards, and their reports are added up.

A rerun continues from the finished parts of the folder:

OUT/work/cut/00000/report.json  a source shard that is cut, beside its runs
OUT/work/written/00000.json     a shard of the corpus that is written
OUT/work/duplicates.npy         ids of texts that occur twice, and the version that is kept
OUT/work/overlap_filter/        hashes of queries and held-out texts

One of several texts with the same id is kept, chosen by its words and not its place. Memory grows with the source by
32 bytes for each text with an id.
"""

import itertools
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import RunError, UserError
from replug.data.files import replace_file, writing
from replug.data.folder import FileSum, sole_writer
from replug.data.prepare.cutting import REGISTRY, Rules, SourceShardReport, cut_source_shard
from replug.data.progress import Progress
from replug.data.sampling import SPLITS, TEXT_SPLITS, KeyCounts
from replug.data.shards import prepared_folder
from replug.data.sources.records import EXAMPLES, Rejected, SourceShard, readable_name

log = logging.getLogger(__name__)

ENOUGH_ROWS = 10_000  # rows after which the share is judged while the source is still being read
NOTHING_TO_READ = ("no_main_text", "empty_file")  # pages of links, `__init__.py`: no damage
LEAST_TEXTS = 1 << 14  # pieces kept for a split of texts: many of a few may repeat others
MAX_REJECTED = 0.1  # share of the rows: more mean that the source is not as expected
SHARDS_PER_PROCESS = 4  # a process takes a second to start, and about as long for four small shards
SHOWN = 3  # texts in a warning; rejected.jsonl has more
Requested = dict[str, int | None]  # requested pieces by split; None means all. Other splits are not made.


class WorkFolder:
    """Paths in a set that is being prepared."""

    def __init__(self, out: Path) -> None:
        self.out, self.path, self.documents = out, out / "work", out / "documents"
        self.shards, self.source_shards = self.path / "written", self.path / "cut"
        self.duplicates, self.overlap_filter = self.path / "duplicates.npy", self.path / "overlap_filter"

    def source_shard(self, number: int) -> Path:
        return self.source_shards / f"{number:05d}"

    def runs(self, split: str) -> list[Path]:
        """Return the sorted runs of a split, over all source shards."""
        return sorted(self.source_shards.glob(f"*/{split}-*.arrow"))

    def finish(self, files: Mapping[str, FileSum], content: Mapping[str, Any]) -> None:
        """Write the manifest, last of all, and remove the work."""
        prepared_folder(self.out).finish(files, content)
        shutil.rmtree(self.path)


@contextmanager
def preparing(out: Path, inputs: Mapping[str, Any], go_on: bool = True) -> Iterator[WorkFolder]:
    """Claim a folder for a set while the block runs.

    Raises UserError if the folder holds other things or a set of other inputs, or if another process writes it. Without
    `go_on`, an unfinished set restarts from the beginning, even if its inputs changed.
    """
    folder, work = prepared_folder(out), WorkFolder(out)
    may_change = () if go_on or folder.is_finished else inputs
    folder.check(inputs, may_change)
    with sole_writer(out):
        folder.claim(inputs, may_change)
        if not go_on:
            for path in (work.path, work.documents):
                shutil.rmtree(path, ignore_errors=True)
            for path in out.glob("*.arrow"):
                path.unlink()
        for path in (work.path, work.documents):
            path.mkdir(exist_ok=True)
        yield work


class Cut:
    """The reports of all source shards, added up as they come in."""

    def __init__(self, source_shards: Sequence[SourceShard], requested: Requested) -> None:
        self.source_shards, self.requested = source_shards, requested
        self.reports: dict[int, SourceShardReport] = {}  # without counts of keys: only their sums are kept
        self.counts = {
            split: KeyCounts(requested.get(split, 0), LEAST_TEXTS * (split in TEXT_SPLITS)) for split in SPLITS
        }
        self.dropped, self.rejected = Counter[str](), Counter[str]()
        self.texts = 0

    def add(self, report: SourceShardReport) -> None:
        self.reports[report.number] = replace(report, counts={})
        self.texts += report.texts
        self.dropped.update(report.dropped)
        self.rejected.update(report.rejected)
        for split in SPLITS:
            self.counts[split].add(report.counts[split])

    def absolute(self, number: int, line: int) -> int:
        """Return the line number in the file of a source shard's line; 0 if a shard before it is not cut yet."""
        names = self.source_shards[number].names
        while line and number and self.source_shards[number - 1].names == names:
            number -= 1
            if number not in self.reports:
                return 0
            line += self.reports[number].lines
        return line

    def too_many_rejected(self) -> bool:
        """Return whether more than a tenth of all rows was rejected, beside files that hold nothing to read."""
        rejected = self.rejected.total() - sum(self.rejected[reason] for reason in NOTHING_TO_READ)
        return rejected > MAX_REJECTED * (self.texts + rejected)


def cut_source(work: WorkFolder, rules: Rules, cut: Cut) -> None:
    """Cut every source shard that an interrupted run has not cut.

    Raises UserError if more than a tenth of the source was rejected.
    """
    for number in range(len(cut.source_shards)):
        if (mark := work.source_shard(number) / "report.json").is_file():
            cut.add(SourceShardReport.read(mark))
    progress = Progress("cutting the source", len(cut.source_shards), len(cut.reports))
    todo = [source_shard for source_shard in cut.source_shards if source_shard.number not in cut.reports]
    jobs = (
        (rules, work.source_shard(shard.number), shard, {split: of.limit for split, of in cut.counts.items()})
        for shard in todo  # limits at each draw
    )
    for report in in_processes(cut_source_shard, jobs, len(todo)):
        cut.add(report)
        progress.advance(note=f"{cut.texts:,} texts")
        if cut.texts >= ENOUGH_ROWS and cut.too_many_rejected():
            break
    _require_few(work, cut)


def _require_few(work: WorkFolder, cut: Cut) -> None:
    """Reject texts with another text's id, and write `rejected.jsonl`: the first hundred of each reason.

    Raises UserError with the first cases where too much was rejected.
    """
    num, places = find_duplicates(work.source_shards.glob("*/texts-*.npy"), work.duplicates)
    if num:
        cut.rejected["duplicate_id"] = num
    if not cut.rejected:
        return
    path, rejected = work.out / "rejected.jsonl", cut.rejected.total()
    cases = [
        replace(case, line=cut.absolute(number, case.line))
        for number in sorted(cut.reports)
        for case in cut.reports[number].examples
    ]
    detail = "another text has this id; data.fields={NAME: id} must name a field that tells all texts apart"
    cases += [
        Rejected("duplicate_id", cut.source_shards[number].names[0], cut.absolute(number, line), detail)
        for number, line in places
    ]
    by_reason, lines = defaultdict[str, list[Rejected]](list), []
    for case in cases:
        by_reason[case.reason].append(case)
        if len(by_reason[case.reason]) <= EXAMPLES:
            row = {"reason": case.reason, "file": readable_name(case.file), "line": case.line or None}
            lines.append(json.dumps({**row, "detail": case.detail}) + "\n")
    replace_file(path, "".join(lines).encode())
    if cut.too_many_rejected():
        first = [str(of_reason[0]) for of_reason in by_reason.values()]
        raise UserError(
            f"{rejected} of {cut.texts + rejected} rows of data.source were rejected, more than a tenth: "
            f"{'; '.join(first[:3])}. "
            f"Counts: {dict(cut.rejected)}; the first of each are listed in {path}"
        )
    shown = "; ".join([*map(str, cases[:SHOWN]), *(["..."] if cases[SHOWN:] else [])])
    log.warning(f"{path} lists texts that could not be read ({rejected:,}): {shown}")


KEPT = np.dtype([("id", np.uint64), ("version", np.uint64)])


def find_duplicates(registers: Iterable[Path], out: Path) -> tuple[int, list[tuple[int, int]]]:
    """Write `out`: the version kept of each id that occurs twice.

    Returns the number of texts with a repeated id, and source shard and line of the first hundred.
    """
    rows = np.concatenate([np.empty(0, REGISTRY), *(np.load(path, allow_pickle=False) for path in registers)])
    rows = rows[np.lexsort([rows[name] for name in ("line", "source_shard", "version", "id")])]
    repeated = rows[1:][rows["id"][1:] == rows["id"][:-1]]
    ids = np.unique(repeated["id"])
    kept = np.empty(len(ids), KEPT)
    kept["id"], kept["version"] = ids, rows["version"][np.searchsorted(rows["id"], ids)]  # the smallest version
    with writing(out):
        np.save(out, kept, allow_pickle=False)
    places = sorted(zip(repeated["source_shard"].tolist(), repeated["line"].tolist(), strict=True))
    return len(repeated), places[:EXAMPLES]


# Processes ----------------------------------------------------------------------------------------------------------


def in_processes(function: Callable, jobs: Iterable[tuple], num_jobs: int) -> Iterator[Any]:
    """Yield a function's results over jobs as they are ready; jobs are drawn one by one, when there is room.

    Few jobs run in this process, more in others, which end with the last; the results do not depend on their number.
    Raises RunError if a process was killed; finished jobs are kept.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m replug`
    is_command = Path(sys.argv[0]).name == "replug" or (spec is not None and spec.name.startswith("replug."))
    cores = len(os.sched_getaffinity(0)) if is_command else 1  # each process would run a user's own program again
    if (num_workers := num_processes(num_jobs, cores)) == 1:
        yield from itertools.starmap(function, jobs)
        return
    drawn, running = iter(jobs), set[Future]()
    executor = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (os.getpid(),))
    try:
        while True:
            for job in itertools.islice(drawn, num_workers + 1 - len(running)):
                running.add(executor.submit(function, *job))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise RunError(
            "a preparing process was killed, perhaps for want of memory; finished work is kept: run the same "
            "command again, on fewer cores if it comes back, such as by `taskset -c 0-3`"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def num_processes(num_shards: int, num_cores: int) -> int:
    """Return the processes that prepare a source: at most one for each core, and for each four shards."""
    return max(1, min(num_cores, num_shards // SHARDS_PER_PROCESS))


def _begin(parent: int) -> None:
    """Limit a worker to one core, and end it when the parent is killed."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()
