"""`checksums.json` of a folder that we wrote: what its files were then, so that who reads it later reads the same.

A folder without it is somebody else's, and taken as it is. It serves folders of small files and of weights: encoders,
runs, evaluations. Prepared sets list checksums in their own mark, and are read a file at a time (`checked_files`).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from replug.config.errors import UserError
from replug.data.files import file_sha256, read_json, write_json, wrong_files

NAME = "checksums.json"


def write_checksums(folder: Path, files: Mapping[str, Path] | None = None) -> None:
    """Of all files of the folder; or of these by their names there, wherever they lie until they are renamed."""
    if files is None:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME)
        files = {str(path.relative_to(folder)): path for path in paths}
    write_json(folder / NAME, {name: file_sha256(path) for name, path in files.items()})


def add_checksum(path: Path) -> None:
    """Of one file more beside those that its folder has checksums of; the others' stay as they are."""
    known = path.parent / NAME
    others = read_json(known, "remove it") if known.is_file() else {}
    write_json(known, {**others, path.name: file_sha256(path)})


def write_last(path: Path, content: object, others: Iterable[Path]) -> None:
    """A file of JSON that says that its folder is finished. Its own checksum and the others' come before."""
    folder, partial = path.parent, path.with_name(path.name + ".partial")
    write_json(partial, content)
    write_checksums(folder, {other.name: other for other in others if other.is_file()} | {path.name: partial})
    partial.replace(path)


def checksum_problems(folder: Path, only: Iterable[str] | None = None) -> list[str]:
    """A line for each file that is missing or another one; none for a folder without checksums.

    `only` looks at these files, where there are checksums of them.
    """
    path = folder / NAME
    if not path.is_file():
        return []
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"{path} is damaged, it is not valid JSON ({error})"]
    if not isinstance(known, dict) or not all(isinstance(sha256, str) for sha256 in known.values()):
        return [f"{path} is damaged, it holds no checksums"]
    return wrong_files(folder, {name: known[name] for name in known if only is None or name in only})


def require_checksums(folder: Path, mend: str, only: Iterable[str] | None = None) -> None:
    """Raise UserError with the first problem, and how to mend it."""
    for problem in checksum_problems(folder, only):
        raise UserError(f"{problem}; {mend}")
