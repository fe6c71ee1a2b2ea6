"""`replug verify` of a prepared set: is every file what its manifest says, and are the parts as many as it counts?"""

import json
from collections.abc import Iterator
from pathlib import Path

from replug.config.errors import UserError
from replug.data.files import wrong_files
from replug.data.progress import Progress
from replug.data.store import PreparedSet, read_manifest


def is_prepared_set(folder: Path) -> bool:
    """True for a folder whose manifest holds a proof of disjointness, or that is still being prepared."""
    try:
        return "disjoint" in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return (folder / "work" / "plan.json").is_file() or (folder / "queries.arrow").is_file()


def verify_prepared(folder: Path) -> tuple[list[str], list[str]]:
    """A line of what is there, and a line for each thing that is wrong: checksums, counts."""
    try:
        manifest = read_manifest(folder)
        problems = list(_file_problems(folder, manifest["files"]))  # first, since what is damaged may not open
        problems += [] if problems else list(_count_problems(PreparedSet(folder)))
    except UserError as error:
        return [], [str(error)]
    counts = manifest["counts"]
    said = ", ".join(f"{count} {split}" for split, count in counts.items())
    found = [f"{folder}: {said}, {'all intact' if not problems else f'wrong in {len(problems)} places'}"]
    return [*found, *_not_covered(folder, manifest)], problems


def _not_covered(folder: Path, manifest: dict) -> Iterator[str]:
    """A line that names the files of which no checksum is known."""
    known = {*manifest["files"], "manifest.json"}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if others := [name for name in names if name not in known and not name.startswith(("work/", "."))]:
        yield f"{folder}: not checked, since no checksum of it is known: {', '.join(others)}"


def _file_problems(folder: Path, files: dict[str, str]) -> Iterator[str]:
    progress = Progress(f"checking {folder}", len(files))
    for name, sha256 in files.items():
        for line in wrong_files(folder, {name: sha256}):
            yield f"{line}; `replug prepare` makes it again"
        progress.advance()


def _count_problems(prepared: PreparedSet) -> Iterator[str]:
    counts = prepared.manifest["counts"]
    found = {"documents": len(prepared.corpus), "queries": len(prepared.queries), "heldout": len(prepared.heldout)}
    found |= {"dev": len(prepared.dev)} if prepared.dev is not None else {}
    for split, number in found.items():
        if number != counts[split]:
            yield f"{prepared.folder} holds {number} {split}, its manifest says {counts[split]}"
