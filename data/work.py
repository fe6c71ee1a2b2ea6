"""The folder of a set that is being prepared: what is finished, so that a rerun goes on from there.

OUT/work/plan.json                what the set is made from
OUT/work/units/00000/report.json  a unit of the source that is cut, beside its runs
OUT/work/shards/00000.json        a shard that is written
OUT/work/guards/                  hashes of queries and held-out texts
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.errors import UserError
from data.assembly import ShardReport
from data.cutting import UnitReport
from data.files import file_sha256, write_json
from data.progress import say

OURS = re.compile(  # what may be removed where a set is begun anew
    r"documents|documents/\d{5,}\.(arrow|tokens\.npy|ends\.npy)|documents/tokens\.json|(queries|heldout)\.arrow|"
    r"manifest\.json|rejected\.jsonl|work|work/(units|shards|guards|(plan|rules|assembly)\.json|duplicates\.npy)|"
    r"work/(queries|heldout)\.arrow"
)


class Work:
    """Raises UserError where other things lie in the folder, or a set of other texts was begun there."""

    def __init__(self, out: Path, origin: dict[str, object], go_on: bool = True) -> None:
        """Where `go_on` is False, an unfinished set of the same keys is begun anew, though their files be others."""
        self.out, self.folder = out, out / "work"
        self.documents = out / "documents"
        _require_ours(out)
        plan = self.folder / "plan.json"
        before = json.loads(plan.read_text()) if plan.is_file() else None
        if before is not None and (go_on or before.keys() != origin.keys()):
            require_same(before, origin, out)
        else:
            shutil.rmtree(out, ignore_errors=True)
        for folder in (self.documents, self.folder / "units", self.folder / "shards"):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(plan, origin)

    @property
    def rules(self) -> Path:
        return self.folder / "rules.json"

    @property
    def assembly(self) -> Path:
        return self.folder / "assembly.json"

    @property
    def duplicates(self) -> Path:
        return self.folder / "duplicates.npy"

    @property
    def guards(self) -> Path:
        return self.folder / "guards"

    def unit(self, number: int) -> Path:
        return self.folder / "units" / f"{number:05d}"

    def shard_mark(self, number: int) -> Path:
        return self.folder / "shards" / f"{number:05d}.json"

    def finished_units(self, count: int) -> Iterator[UnitReport]:
        """Units that need not be cut again; a damaged one is named and cut again."""
        for number in range(count):
            mark = self.unit(number) / "report.json"
            if mark.is_file():
                report = UnitReport.read(mark)
                if _intact(self.unit(number), report.files):
                    yield report

    def finished_shards(self) -> Iterator[ShardReport]:
        """Shards that need not be written again; a damaged one is named and written again."""
        for mark in sorted((self.folder / "shards").glob("*.json")):
            report = ShardReport.read(mark)
            if _intact(self.documents, report.files):
                yield report

    def end(self) -> None:
        shutil.rmtree(self.folder)


def require_same(before: dict, origin: dict[str, object], out: Path) -> None:
    """Raise UserError naming the first key in which two origins differ."""
    for key in sorted({*before, *origin}):
        if before.get(key) != origin.get(key):
            raise UserError(
                f"{out} was prepared with {key}={before.get(key)}, now it is {origin.get(key)}: remove the "
                "folder or give another data.out"
            )


def _require_ours(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give another data.out")
    paths = sorted(path for pattern in ("*", "documents/*", "work/*") for path in out.glob(pattern))
    for name in (str(path.relative_to(out)) for path in paths):
        if not OURS.fullmatch(name.removesuffix(".partial")):
            raise UserError(f"{out} holds {name}, which is no part of a prepared set; give another data.out")


def _intact(folder: Path, files: dict[str, str]) -> bool:
    wrong = wrong_files(folder, files)
    if wrong:
        say(f"{wrong[0]}; making it again")
    return not wrong


def wrong_files(folder: Path, files: dict[str, str]) -> list[str]:
    """A line for each file that is missing or not what its checksum says."""
    found: list[str] = []
    for name, sha256 in files.items():
        if not (folder / name).is_file():
            found.append(f"{folder / name} is missing")
        elif file_sha256(folder / name) != sha256:
            found.append(f"{folder / name} is damaged: its checksum differs")
    return found


def unit_files(units: Sequence) -> list[str]:
    """The first file of each unit."""
    return [unit.names[0] for unit in units]
