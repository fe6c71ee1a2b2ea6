"""Files of a prepared set, compared with their checksums when a process first reads them.

A flipped bit in a memory-mapped file is another text or another token, and nothing else would notice. So each file is
hashed once in a process, just before its first rows are read: a file at a time, never the whole corpus at its start.
What wrote the files wrote their checksums down, in manifest.json of a prepared set or in corpus.json of documents
alone. Files without either, such as those of a set that is being made, are not compared. Folders that have no such mark
and are read whole, such as encoders, have `checksums`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.data.files import write_json, wrong_files

MARKS = ("manifest.json", "corpus.json")
FIX = "remove the folder and run `replug prepare` again"
OWN = "sha256_of_this"  # a mark's checksum of its own other keys


class CheckedFiles:
    """The files under a folder, by their checksums. A call may come from any thread: at worst a file is read twice."""

    def __init__(self, folder: Path, mark: Mapping[str, Any]) -> None:
        self._folder, self._unread = folder, dict(mark.get("files", {}))
        self.num_documents: int | None = mark.get("counts", {}).get("documents")

    @staticmethod
    def of_set(folder: Path) -> "CheckedFiles":
        """Those that the mark of a prepared set, or of a corpus alone, lists."""
        marks = [read_mark(folder / name) for name in MARKS if (folder / name).is_file()]
        return CheckedFiles(folder, marks[0] if marks else {})

    def require(self, name: str, meaning: str = "") -> None:
        """Raise UserError, which names the file and what follows, where it is not what its checksum says.

        It is read once.
        """
        sha256 = self._unread.get(name)
        if sha256 is None:
            return
        for problem in wrong_files(self._folder, {name: sha256}):
            raise UserError(f"{problem}{meaning}; `replug prepare` makes it again, or remove {self._folder}")
        self._unread.pop(name, None)


def write_mark(path: Path, content: dict[str, Any]) -> None:
    """A mark with its own checksum."""
    write_json(path, {**content, OWN: _own_sha256(content)})


def read_mark(path: Path, mend: str = FIX) -> dict[str, Any]:
    """The content of a mark, with its checksum. Raises UserError where it is damaged, and says how to `mend` it."""
    content = read_mark_unchecked(path, mend)
    require_own_checksum(path, content, mend)
    return content


def read_mark_unchecked(path: Path, mend: str = FIX) -> dict[str, Any]:
    """For who has more to say of what is wrong with it. Raises UserError for what is no JSON; no object is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); {mend}") from error
    return content if isinstance(content, dict) else {}


def require_own_checksum(path: Path, content: dict[str, Any], mend: str = FIX) -> None:
    """Raise UserError where a mark's content is not what it was; one of an older version has no checksum."""
    others = {name: value for name, value in content.items() if name != OWN}
    if OWN in content and content[OWN] != _own_sha256(others):
        raise UserError(f"{path} is damaged: its content differs from its own checksum; {mend}")


def _own_sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
