"""The contract of every folder that a command makes: run, labels, prepared set, index version, evaluation.

    FOLDER/inputs.json     written first: the inputs of the folder, by name
    FOLDER/manifest.json   written last: the bytes and the sha256 of each file
    FOLDER/.writer.json    locked while a process writes the folder; it names the process

Both JSON files hold a checksum of themselves. The operating system frees the lock when the process ends, also after
kill -9. Folders of encoders are written for other libraries too: `checksums.json` lists their files instead.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from replug.config.errors import UserError
from replug.data.files import file_sha256, json_sha256, read_json, reading, write_json
from replug.data.progress import Progress

INPUTS, MANIFEST, LOCK, CHECKSUMS = "inputs.json", "manifest.json", ".writer.json", "checksums.json"
OWN = "sha256_of_this"

FileSum = dict[str, Any]  # "bytes" and "sha256" of a file


class Folder:
    """A folder of one kind, such as "run" or "prepared set".

    `key` is the setting for another path, `fix_hint` the advice for a damaged file. `others` are patterns of names
    that may lie in the folder beside the finished files: work files, logs, other commands' folders.
    """

    def __init__(
        self, path: Path, kind: str, *, key: str, fix_hint: str, others: Collection[str] = (), format: int = 1
    ) -> None:
        self.path, self.kind, self.key, self.fix_hint = path, kind, key, fix_hint
        self._others, self._format = (*others, ".*", INPUTS, f"{INPUTS}.partial"), format
        self._unread: dict[str, FileSum] | None = None  # files that `require` has not compared yet

    @property
    def is_finished(self) -> bool:
        return (self.path / MANIFEST).is_file()

    @property
    def inputs(self) -> dict[str, Any] | None:
        """Return the inputs of the folder, None before a claim."""
        path = self.path / INPUTS
        return self._read(path)["inputs"] if path.is_file() else None

    def check(self, inputs: Mapping[str, Any], may_change: Collection[str] = (), are_all: bool = True) -> None:
        """Raise UserError if the folder is not ours, or was made from other inputs. Writes nothing.

        Missing inputs count as differences only if `are_all`.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.key}: {self.path} is a file; expected a folder")
        if self.inputs is None:
            for name in sorted(path.name for path in self.path.iterdir()) if self.path.exists() else ():
                if not any(fnmatch(name, pattern) for pattern in self._others):
                    raise UserError(
                        f"{self.key}: {self.path} holds {name}, which is not part of the {self.kind}; give another "
                        f"{self.key}"
                    )
        for name, (old, new) in self.changed(inputs, are_all).items():
            if name not in may_change:
                state = "" if self.is_finished else "unfinished "
                raise UserError(
                    f"{name} is {new!r}, but the {state}{self.kind} in {self.path} was made with {old!r}: give the "
                    f"same value or another {self.key}, or remove the folder"
                )

    def changed(self, inputs: Mapping[str, Any], are_all: bool = True) -> dict[str, tuple[Any, Any]]:
        """Return (old, new) of each input that differs; none for an unclaimed folder."""
        before, now = self.inputs, _as_json(inputs)
        names = () if before is None else {**before, **now} if are_all else now
        pairs = ((name, ((before or {}).get(name), now.get(name))) for name in names)
        return {name: pair for name, pair in pairs if pair[0] != pair[1]}

    def claim(self, inputs: Mapping[str, Any], may_change: Collection[str] = ()) -> None:
        """Begin or resume the folder. The caller holds its lock. Inputs are JSON values by name.

        Raises UserError if the folder is not ours, or was made from other inputs that are not in `may_change`.
        A changed input makes a finished folder unfinished.
        """
        self.check(inputs, may_change)
        if self.inputs != _as_json(inputs):
            self.reopen()
            self.path.mkdir(parents=True, exist_ok=True)
            write_mark(self.path / INPUTS, {"kind": self.kind, "format": self._format, "inputs": dict(inputs)})

    def reopen(self) -> None:
        """Mark the folder as unfinished, before a file in it changes."""
        (self.path / MANIFEST).unlink(missing_ok=True)
        self._unread = None

    def finish(self, files: Iterable[str] | Mapping[str, FileSum], content: Mapping[str, Any] | None = None) -> None:
        """Write the manifest last: it marks the folder as finished.

        `files` are names in the folder, with their bytes and sha256 if known. `content` is added to the manifest.
        """
        listed = dict(files) if isinstance(files, Mapping) else {name: file_sum(self.path / name) for name in files}
        if (self.path / INPUTS).is_file():
            listed[INPUTS] = file_sum(self.path / INPUTS)
        head = {"kind": self.kind, "format": self._format}
        write_mark(self.path / MANIFEST, {**head, **(content or {}), "files": listed})
        self._unread = None

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. Raises UserError if the folder is unfinished, of another kind, or damaged."""
        if not self.is_finished:
            raise UserError(
                f"{self.path} holds no finished {self.kind}: {MANIFEST} is missing; run the command that makes it again"
            )
        content = self._read(self.path / MANIFEST)
        if not isinstance(content.get("files"), dict):
            raise UserError(f"{self.path / MANIFEST} lists no files; {self.fix_hint}")
        return content

    def require(self, *names: str, meaning: str = "") -> None:
        """Raise UserError if one of these files (by default any) is missing or changed; each is compared once.

        Unlisted files and folders without a manifest pass unchecked. `meaning` adds the consequence of a changed file
        to the message. Threads may share a folder: at worst a file is compared twice.
        """
        if self._unread is None:
            self._unread = dict(self.manifest()["files"]) if self.is_finished else {}
        for name in names or tuple(self._unread):
            if name in self._unread:
                for problem in file_problems(self.path, {name: self._unread[name]}):
                    raise UserError(f"{problem}{meaning}; {self.fix_hint}")
                self._unread.pop(name, None)

    def _read(self, path: Path) -> dict[str, Any]:
        content = read_mark(path, self.fix_hint)
        if content.get("kind") != self.kind:
            other = content.get("kind", "unknown")
            raise UserError(f"{self.path} holds the {other}; expected the {self.kind}; give another {self.key}")
        if content.get("format") != self._format:
            raise UserError(
                f"{path} was written by another version of replug; remove {self.path} or give another {self.key}"
            )
        return content


def _as_json(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(inputs)))


def file_sum(path: Path) -> FileSum:
    """Return a file's bytes and sha256."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def kind_of(path: Path) -> str | None:
    """Return the kind of a folder. None if replug did not write it, or if both JSON files are damaged."""
    for name in (INPUTS, MANIFEST):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((path / name).read_text(encoding="utf-8"))["kind"])
    return None


def file_problems(folder: Path, files: Mapping[str, FileSum]) -> list[str]:
    """Return a line for each file that is missing or differs from its size and checksum."""
    problems = []
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != known["bytes"] or file_sha256(path) != known["sha256"]:
            problems.append(f"{path} is damaged: its checksum differs")
    return problems


def manifest_problems(folder: Path) -> list[str]:
    """Return a line for each listed file of a folder that is missing or damaged; none for an unfinished folder."""
    if not (folder / MANIFEST).is_file():
        return []
    try:
        files = read_mark(folder / MANIFEST, "remove it, and run the command that made the folder again")["files"]
    except UserError as error:
        return [str(error)]
    problems, progress = [], Progress(f"checking {folder}", len(files))
    for name in files:
        problems += file_problems(folder, {name: files[name]})
        progress.advance()
    return problems


def require_file(path: Path, known: FileSum, fix_hint: str) -> None:
    """Raise UserError for a missing or changed file, RunError if the system fails to read it."""
    with reading(path):
        for problem in file_problems(path.parent, {path.name: known}):
            raise UserError(f"{problem}; {fix_hint}")


# A run directory -----------------------------------------------------------------------------------------

# Costly results that depend on a run's keys and set. LM scores are not listed: their cache serves any run.
RUN_WORK = ("labels/*.parquet", "metrics.jsonl", "fitted.json", MANIFEST)


def run_work(run: Path) -> Path | None:
    """Return a file that was made from a run's keys and set; None while they may still change."""
    is_claimed = any((run / claim).is_file() for claim in (INPUTS, f"labels/{INPUTS}"))
    patterns = RUN_WORK if is_claimed else (*RUN_WORK, f"index/v*/{MANIFEST}")  # unclaimed: made for the index
    return next((path for pattern in patterns for path in run.glob(pattern)), None)


# JSON with its own checksum ------------------------------------------------------------------------------


def write_mark(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with its own checksum."""
    write_json(path, {**content, OWN: json_sha256(content)})


def read_mark(path: Path, fix_hint: str) -> dict[str, Any]:
    """Return the content of a mark, without its checksum. Raises UserError with the `fix_hint` if it is damaged."""
    content = read_json(path, fix_hint)
    if not isinstance(content, dict) or OWN not in content:
        raise UserError(f"{path} was not written by replug: it has no {OWN}; give another folder, or move it elsewhere")
    if content.pop(OWN) != json_sha256(content):
        raise UserError(f"{path} is damaged: its content differs from its own checksum; {fix_hint}")
    return content


# Folders of encoders -------------------------------------------------------------------------------------


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` of all files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / CHECKSUMS]
    write_mark(folder / CHECKSUMS, {"files": {str(path.relative_to(folder)): file_sum(path) for path in paths}})


def add_checksum(path: Path) -> None:
    """Add one file to the `checksums.json` beside it, created if missing."""
    known = path.parent / CHECKSUMS
    others = read_mark(known, "remove it")["files"] if known.is_file() else {}
    write_mark(known, {"files": {**others, path.name: file_sum(path)}})


def checksum_problems(folder: Path, only: Iterable[str] | None = None) -> list[str]:
    """Return a line for each file that is missing or damaged; none for a folder without `checksums.json`.

    `only` restricts the check to these names.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return []
    try:
        known = read_mark(path, "remove it, or bring it back")["files"]
    except UserError as error:
        return [str(error)]
    return file_problems(folder, {name: known[name] for name in known if only is None or name in only})


def require_checksums(folder: Path, fix_hint: str, only: Iterable[str] | None = None) -> None:
    """Raise UserError with the first problem and the `fix_hint`."""
    for problem in checksum_problems(folder, only):
        raise UserError(f"{problem}; {fix_hint}")


# The lock ------------------------------------------------------------------------------------------------


@contextmanager
def sole_writer(*folders: Path) -> Iterator[None]:
    """Let this process alone write the folders while the block runs. Missing folders are made.

    Raises UserError if another process writes one of them, or if it cannot be locked.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(path.absolute() for path in folders):
            held.enter_context(_locked(folder, folder / LOCK))
        yield


@contextmanager
def _locked(what: Path, record: Path) -> Iterator[None]:
    is_new = not record.parent.exists()
    lock = _lock(record)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        while not _is_locked(record):  # the previous holder removed the file that is locked now
            lock.release()
            lock.acquire()
    except Timeout as error:
        who = "another process"  # unless it has written the record already
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(record.read_text())
            who = "process {pid} on {host} since {since} (`{command}`)".format(**known)
        raise UserError(f"{what} is being written by {who}: wait for its end, or give another one") from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what} cannot be written: {reason}; give another one") from error
    try:
        with suppress(OSError):  # a full disk: the lock holds without its record
            since, command = time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(["replug", *sys.argv[1:]])[:200]
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}
            record.write_text(json.dumps(holder))
        yield
    finally:
        record.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                record.parent.rmdir()  # a refused command leaves no empty folder behind
        lock.release()


def _lock(record: Path) -> FileLock:
    return FileLock(record, timeout=0, fallback_to_soft=False)  # a soft lock would outlive kill -9


def _is_locked(record: Path) -> bool:
    try:
        with _lock(record):
            return False
    except Timeout:
        return True
