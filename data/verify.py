"""`replug verify` of a prepared set: is every file what its manifest says, and are the parts as many as it counts?"""

import json
from collections.abc import Iterator
from pathlib import Path

from replug.configs.errors import UserError
from replug.data.files import wrong_files
from replug.data.progress import Progress
from replug.data.store import PreparedSet, read_manifest

TEXTS = ("queries.arrow", "heldout.arrow")


def is_prepared_set(folder: Path) -> bool:
    """True for a folder whose manifest holds a proof of disjointness, or that is still being prepared."""
    try:
        return "disjoint" in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return (folder / "work" / "plan.json").is_file() or (folder / "queries.arrow").is_file()


def require_texts_as_prepared(prepared: PreparedSet) -> None:
    """Raise UserError where training or held-out texts are not those that the manifest's proof is about."""
    files = prepared.manifest["files"]
    for name in TEXTS:
        if name not in files:
            raise UserError(f"{prepared.folder}/manifest.json has no checksum of {name}; run `replug prepare` again")
        for problem in wrong_files(prepared.folder, {name: files[name]}):
            raise UserError(
                f"{problem}, so the manifest's proof that training and held-out texts are disjoint is not of it: bring "
                "the file back, or run `replug prepare` again"
            )


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
    return [f"{folder}: {said}, {'all intact' if not problems else f'wrong in {len(problems)} places'}"], problems


def _file_problems(folder: Path, files: dict[str, str]) -> Iterator[str]:
    progress = Progress(f"checking {folder}", len(files))
    for name, sha256 in files.items():
        for line in wrong_files(folder, {name: sha256}):
            yield f"{line}; `replug prepare` makes it again"
        progress.advance()


def _count_problems(prepared: PreparedSet) -> Iterator[str]:
    counts = prepared.manifest["counts"]
    found = {"documents": len(prepared.corpus), "queries": len(prepared.queries), "heldout": len(prepared.heldout)}
    for split, number in found.items():
        if number != counts[split]:
            yield f"{prepared.folder} holds {number} {split}, its manifest says {counts[split]}"
