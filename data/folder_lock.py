"""One writer for a folder: a second process is refused, with the name of the first.

`FOLDER/.writer.json` is the lock. It names the process that holds it. The operating system frees the lock when the
process ends, also after kill -9.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from replug.config.errors import UserError

NAME = ".writer.json"


@contextmanager
def sole_writer(*folders: Path) -> Iterator[None]:
    """Let this process alone write the folders while the block runs. Missing folders are made.

    Raises UserError if another process writes one of them, or if it cannot be locked.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(path.absolute() for path in folders):
            held.enter_context(_locked(folder, folder / NAME))
        yield


@contextmanager
def _locked(what: Path, record: Path) -> Iterator[None]:
    is_new = not record.parent.exists()
    lock = _lock(record)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        while not _is_locked(record):  # the holder before removed the file that is locked now
            lock.release()
            lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{what} is being written by {_holder(record)}: wait for its end, or give another one"
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what} cannot be written: {reason}; give another one") from error
    try:
        with suppress(OSError):  # a full disk: the lock holds without its record
            record.write_text(json.dumps(_this_process()))
        yield
    finally:
        record.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                record.parent.rmdir()  # a command that was refused leaves no empty folder behind
        lock.release()


def _lock(record: Path) -> FileLock:
    return FileLock(record, timeout=0, fallback_to_soft=False)  # a soft lock would outlive kill -9


def _is_locked(record: Path) -> bool:
    try:
        with _lock(record):
            return False
    except Timeout:
        return True


def _this_process() -> dict[str, object]:
    command = " ".join(["replug", *sys.argv[1:]])[:200]
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command,
    }


def _holder(record: Path) -> str:
    try:
        return "process {pid} on {host} since {since} (`{command}`)".format(**json.loads(record.read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # it has not written the record yet
        return "another process"
