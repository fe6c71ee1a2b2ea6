"""Manifests: which files a folder held when it was finished, and their checksums.

A manifest is JSON and is written last. `files` holds the sha256 of each file by its name, and `sha256_of_this` that of
the manifest's own other keys. A folder without a manifest is unfinished, or somebody else's and taken as it is.

    manifest.json    prepared sets; index versions
    corpus.json      documents without texts to train on
    labels.json      labels
    checksums.json   encoders, finished runs and evaluations

Small folders are compared whole when they are loaded. `CheckedFiles` compares a large set file by file, each when a
process first reads it: a flipped bit in a memory-mapped file is another text, and nothing else would notice.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.files import file_sha256, write_json, wrong_files

NAME = "checksums.json"
MARKS = ("manifest.json", "corpus.json")
OWN = "sha256_of_this"
FIX = "remove the folder and run `replug prepare` again"


def write_mark(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with its own checksum."""
    write_json(path, {**content, OWN: _own_sha256(content)})


def read_mark(path: Path, mend: str = FIX) -> dict[str, Any]:
    """Return the content of a mark, without its checksum. Raises UserError, with how to `mend` it, if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged, it is not valid JSON ({error}); {mend}") from error
    if not isinstance(content, dict) or content.pop(OWN, None) != _own_sha256(content):
        raise UserError(f"{path} is damaged: its content differs from its own checksum; {mend}")
    return content


def _own_sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checksums(folder: Path, files: Mapping[str, Path] | None = None) -> None:
    """Write `checksums.json`. `files` gives names and where they lie until they are renamed; None means all files."""
    if files is None:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME)
        files = {str(path.relative_to(folder)): path for path in paths}
    write_mark(folder / NAME, {"files": {name: file_sha256(path) for name, path in files.items()}})


def add_checksum(path: Path) -> None:
    """Add one file to the `checksums.json` beside it, which is made if it is missing."""
    known = path.parent / NAME
    others = read_mark(known, "remove it")["files"] if known.is_file() else {}
    write_mark(known, {"files": {**others, path.name: file_sha256(path)}})


def write_last(path: Path, content: object, others: Iterable[Path]) -> None:
    """Write the JSON that says that its folder is finished, after `checksums.json` of it and of the others there."""
    folder, partial = path.parent, path.with_name(path.name + ".partial")
    write_json(partial, content)
    write_checksums(folder, {other.name: other for other in others if other.is_file()} | {path.name: partial})
    partial.replace(path)


def checksum_problems(folder: Path, only: Iterable[str] | None = None, manifest: str = NAME) -> list[str]:
    """Return a line for each file that is missing or damaged; none for a folder without the manifest.

    `only` names the files to look at, as far as they have checksums.
    """
    path = folder / manifest
    if not path.is_file():
        return []
    try:
        known = read_mark(path, "remove it, or bring it back")["files"]
    except UserError as error:
        return [str(error)]
    return wrong_files(folder, {name: known[name] for name in known if only is None or name in only})


def require_checksums(folder: Path, mend: str, only: Iterable[str] | None = None, manifest: str = NAME) -> None:
    """Raise UserError with the first problem, and how to mend it."""
    for problem in checksum_problems(folder, only, manifest):
        raise UserError(f"{problem}; {mend}")


class CheckedFiles:
    """The files of a prepared set, or of documents alone. Any thread may call it: at worst a file is hashed twice."""

    def __init__(self, folder: Path) -> None:
        mark = next((read_mark(folder / name) for name in MARKS if (folder / name).is_file()), {})
        self._folder, self._unread = folder, dict(mark.get("files", {}))
        self.num_documents: int | None = mark.get("counts", {}).get("documents")

    def require(self, name: str, meaning: str = "") -> None:
        """Compare a file, once. Raises UserError with its name and what follows if it differs."""
        sha256 = self._unread.get(name)
        if sha256 is None:
            return
        for problem in wrong_files(self._folder, {name: sha256}):
            raise UserError(f"{problem}{meaning}; {FIX}")
        self._unread.pop(name, None)
