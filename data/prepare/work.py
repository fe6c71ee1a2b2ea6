"""The folder of a set that is being prepared: what is finished, so that a rerun goes on from there.

OUT/work/plan.json                        what the set is made from
OUT/work/source_shards/00000/report.json  a source shard that is cut, beside its runs
OUT/work/shards/00000.json                a shard of the corpus that is written
OUT/work/margin.json                      how many pieces are kept for one asked for, where it is not the usual number
OUT/work/overlap_filters/                 hashes of queries and held-out texts
"""

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from replug.config.errors import UserError
from replug.data.files import write_json, wrong_files
from replug.data.folder import LOCK as WRITER
from replug.data.folder import sole_writer
from replug.data.prepare.cutting import SourceShardReport

log = logging.getLogger(__name__)


MARGIN, WIDER = 2, 4  # pieces kept for one asked for, at first; and by how much more where that was not enough
OURS = re.compile(  # what may be removed where a set is begun anew
    r"documents|documents/\d{5,}\.(arrow|tokens\.npy|ends\.npy)|documents/tokens\.json|(queries|heldout|dev)\.arrow|"
    r"manifest\.json|rejected\.jsonl|work|work/(source_shards|shards|overlap_filters)|"
    r"work/((plan|rules|assembly|margin)\.json|duplicates\.npy)|"
    rf"work/(queries|heldout|dev)\.arrow|{re.escape(WRITER)}"
)


class WorkFolder:
    """The work of one process on a set, while its block runs.

    Raises UserError where other things lie in the folder, a set of other texts was begun there, or another process is
    at work on it. Where `go_on` is False, an unfinished set of the same keys is begun anew, whatever is in their files.
    """

    def __init__(self, out: Path, origin: dict[str, object], go_on: bool = True) -> None:
        self.out, self.folder, self.documents = out, out / "work", out / "documents"
        self.rules, self.assembly = self.folder / "rules.json", self.folder / "assembly.json"
        self.duplicates, self.overlap_filters = self.folder / "duplicates.npy", self.folder / "overlap_filters"
        self._origin, self._go_on = origin, go_on
        self._held = ExitStack()

    def __enter__(self) -> "WorkFolder":
        _require_ours(self.out)
        with ExitStack() as held:
            held.enter_context(sole_writer(self.out))
            self._begin()
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _begin(self) -> None:
        self.folder.mkdir(exist_ok=True)
        plan = self.folder / "plan.json"
        before = json.loads(plan.read_text()) if plan.is_file() else None
        if before is not None and (self._go_on or before.keys() != self._origin.keys()):
            require_same(before, self._origin, self.out, "holds an unfinished set that was prepared")
        else:
            _clear(self.out, but={self.folder, self.out / WRITER})
            _clear(self.folder)
        for folder in (self.documents, self.folder / "source_shards", self.folder / "shards"):
            folder.mkdir(exist_ok=True)
        write_json(plan, self._origin)

    @property
    def margin(self) -> int:
        """How many pieces are kept for one asked for."""
        path = self.folder / "margin.json"
        return json.loads(path.read_text()) if path.is_file() else MARGIN

    def widen(self) -> None:
        """Keep more pieces for one asked for; everything is cut again."""
        margin = WIDER * self.margin
        for name in ("shards", "source_shards"):
            _clear(self.folder / name)
        write_json(self.folder / "margin.json", margin)

    def source_shard(self, number: int) -> Path:
        return self.folder / "source_shards" / f"{number:05d}"

    def shard_mark(self, number: int) -> Path:
        return self.folder / "shards" / f"{number:05d}.json"

    def finished_source_shards(self, count: int) -> Iterator[SourceShardReport]:
        """Reports of source shards that need not be cut again; a damaged one is named and cut again."""
        for number in range(count):
            mark = self.source_shard(number) / "report.json"
            if mark.is_file():
                report = SourceShardReport.read(mark)
                if is_intact(self.source_shard(number), report.files):
                    yield report

    def end(self) -> None:
        shutil.rmtree(self.folder)


def require_same(before: dict, origin: dict[str, object], out: Path, what: str = "was prepared") -> None:
    """Raise UserError naming the first key in which two origins differ."""
    for key in sorted({*before, *origin}):
        if before.get(key) != origin.get(key):
            raise UserError(
                f"{out} {what} with {key}={before.get(key)}, now it is "
                f"{origin.get(key)}: remove the folder or give another data.out"
            )


def _clear(folder: Path, but: Collection[Path] = ()) -> None:
    for path in folder.iterdir():
        if path in but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_ours(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give another data.out")
    paths = sorted(path for pattern in ("*", "documents/*", "work/*") for path in out.glob(pattern))
    for name in (str(path.relative_to(out)) for path in paths):
        if not OURS.fullmatch(name.removesuffix(".partial")):
            raise UserError(f"{out} holds {name}, which is no part of a prepared set; give another data.out")


def is_intact(folder: Path, files: dict[str, str]) -> bool:
    wrong = wrong_files(folder, files)
    if wrong:
        log.warning(f"{wrong[0]}; making it again")
    return not wrong
