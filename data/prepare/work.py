"""The folder of a set that is being prepared: a rerun continues from its finished parts.

OUT/work/rules.json                       how texts are cut and documents are read, for the workers
OUT/work/source_shards/00000/report.json  a source shard that is cut, beside its runs
OUT/work/shards/00000.json                a shard of the corpus that is written
OUT/work/margin.json                      pieces that are kept for each requested one, where not the usual number
OUT/work/duplicates.npy                   ids of texts that occur twice, and the version that is kept
OUT/work/overlap_filter/                  hashes of queries and held-out texts
"""

import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from replug.config.errors import RunError
from replug.data.files import write_json
from replug.data.folder import FileSum, Folder, file_problems, sole_writer
from replug.data.shards import prepared_folder

log = logging.getLogger(__name__)

MARGIN, WIDER = 2, 4  # pieces kept for each requested one, at first; and the factor where that was not enough


class WorkFolder:
    """Paths in a set that is being prepared. Workers get it too."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self.out = folder, folder.path
        self.path, self.documents = self.out / "work", self.out / "documents"
        self.rules, self.duplicates = self.path / "rules.json", self.path / "duplicates.npy"
        self.overlap_filter = self.path / "overlap_filter"

    def begin(self, afresh: bool) -> None:
        """Make the folders; what an interrupted run left is removed if the set is begun `afresh`."""
        if afresh:
            for folder in (self.path, self.documents):
                shutil.rmtree(folder, ignore_errors=True)
            for path in self.out.glob("*.arrow"):
                path.unlink()
        for folder in (self.documents, self.path / "source_shards", self.path / "shards"):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def margin(self) -> int:
        """Return how many pieces are kept for each requested one."""
        path = self.path / "margin.json"
        return json.loads(path.read_text()) if path.is_file() else MARGIN

    def widen(self) -> None:
        """Keep more pieces for each requested one; everything is cut again."""
        margin = WIDER * self.margin
        for name in ("shards", "source_shards"):
            shutil.rmtree(self.path / name)
            (self.path / name).mkdir()
        write_json(self.path / "margin.json", margin)

    def source_shard(self, number: int) -> Path:
        return self.path / "source_shards" / f"{number:05d}"

    def runs(self, split: str) -> list[Path]:
        """Return the sorted runs of a split, over all source shards."""
        return sorted(self.path.glob(f"source_shards/*/{split}-*.arrow"))

    def shard_mark(self, number: int) -> Path:
        return self.path / "shards" / f"{number:05d}.json"

    def finish(self, files: Mapping[str, FileSum], content: Mapping[str, Any]) -> None:
        """Write the manifest, last of all, and remove the work."""
        self._folder.finish(files, content)
        shutil.rmtree(self.path)


@contextmanager
def preparing(out: Path, inputs: Mapping[str, Any], go_on: bool = True) -> Iterator[WorkFolder]:
    """Claim a folder for a set while the block runs.

    Raises UserError if the folder holds other things or a set of other inputs, or if another process writes it. Unless
    it is to `go_on`, an unfinished set of the same keys is begun anew, whatever is in their files.
    """
    folder = prepared_folder(out)
    may_change = () if go_on or folder.is_finished else inputs
    folder.check(inputs, may_change)
    with sole_writer(out):
        folder.claim(inputs, may_change)
        work = WorkFolder(folder)
        work.begin(afresh=not go_on)
        yield work


def is_intact(folder: Path, files: Mapping[str, FileSum]) -> bool:
    problems = file_problems(folder, files)
    if problems:
        log.warning(f"{problems[0]}; making it again")
    return not problems


# Processes ----------------------------------------------------------------------------------------------------------


class LocalPool:
    """Runs a function over jobs, in `num_workers` processes that end with the block, or in this one alone."""

    def __init__(self, num_workers: int = 1) -> None:
        self._num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "LocalPool":
        if self._num_workers > 1:
            self._executor = ProcessPoolExecutor(self._num_workers, get_context("spawn"), _begin, (os.getpid(),))
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, function: Callable, jobs: Iterable[tuple]) -> Iterator[Any]:
        """Yield results as they are ready; jobs are drawn one by one, when there is room.

        Raises RunError if a process was killed; what was finished is kept.
        """
        if self._executor is None:
            yield from (function(*job) for job in jobs)
            return
        drawn, running = iter(jobs), set[Future]()
        try:
            while True:
                for job in itertools.islice(drawn, self._num_workers + 1 - len(running)):
                    running.add(self._executor.submit(function, *job))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenProcessPool as error:
            raise RunError(
                "a process of data.num_workers was killed, perhaps for want of memory; what it had finished is kept: "
                "run the same command again, with fewer data.num_workers if it comes back"
            ) from error


def _begin(parent: int) -> None:
    """Give each process one core, and let none stay behind when the parent is killed."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()
