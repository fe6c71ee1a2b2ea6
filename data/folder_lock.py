"""One writer for a folder: who writes it is said in the folder, and a second process is refused by that name.

`FOLDER/.writer.json` holds the writer's process, machine and command, and since when. On a disk of this machine the
operating system locks that file, and frees it with the process, also after kill -9.

A file system that several machines share may lock for one machine alone, or not at all. There the lock is a lease as
well: the writer counts up in the file every `BEAT_SECONDS`, and who finds the file of another machine watches it for
`LEASE_SECONDS`. What counts on meanwhile is alive; what does not is gone, and the folder is taken over. A writer that
finds its lease taken (it was suspended, say) ends at once, with a line that says so.
"""

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

from replug.configs.errors import UserError
from replug.data.file_systems import shared_file_system

log = logging.getLogger(__name__)

NAME = ".writer.json"
BEAT_SECONDS, LEASE_SECONDS = 10.0, 60.0
SETTLE_SECONDS = 1.0  # after which one of two who wrote at once sees the other's record
RECORD_BYTES = 4096  # always so many: written in place by one call, so that no reader sees half of it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # a machine's own, whatever hosts are called


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes a folder. `lease` tells two takings apart, `beats` shows that one is alive."""

    pid: int
    host: str
    boot: str
    command: str
    since: str
    lease: str
    beats: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} (`{self.command}`)"


@contextmanager
def sole_writer(*folders: Path) -> Iterator[None]:
    """While the block runs, this process alone writes the folders, which are made where they are not there.

    Raises UserError naming the folder and who writes it, or why it cannot be written.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(path.absolute() for path in folders):
            held.enter_context(_one(folder))
        yield


@contextmanager
def _one(folder: Path) -> Iterator[None]:
    is_new = not folder.exists()
    descriptor, has_locks = _locked(folder)
    try:
        with _lease(folder, descriptor, has_locks) if shared_file_system(folder) else _recorded(descriptor):
            try:
                yield
            finally:
                (folder / NAME).unlink(missing_ok=True)  # before it is freed: nobody else can have it by then
    finally:
        os.close(descriptor)
        if is_new:  # a command that was refused leaves no empty folder behind
            with suppress(OSError):
                folder.rmdir()


def _locked(folder: Path) -> tuple[int, bool]:
    """The descriptor of the locked file, and whether the file system has locks at all.

    Where the one before has just removed the file, the lock would be of one without a name: it is taken anew.
    """
    while True:
        descriptor = _opened(folder)
        try:
            has_locks = _lock(folder, descriptor)
            if _is_still_there(folder, descriptor):
                return descriptor, has_locks
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; give another folder") from error


def _lock(folder: Path, descriptor: int) -> bool:
    """Whether there are locks; raises UserError where another process has this one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _refusal(folder, _read(descriptor)) from error
    except OSError as error:  # a shared file system without locks: the lease has to do
        log.info(f"{folder} has no locks ({error.strerror}); who writes it is told by {NAME} alone")
        return False
    return True


def _is_still_there(folder: Path, descriptor: int) -> bool:
    try:
        return os.stat(folder / NAME).st_ino == os.fstat(descriptor).st_ino  # noqa: PTH116 - beside its descriptor's
    except FileNotFoundError:
        return False


def _refusal(folder: Path, writer: Writer | None) -> UserError:
    return UserError(
        f"{folder} is being written by {writer or 'another process'}: wait for its end, or give another folder"
    )


def _this_process() -> Writer:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    command = " ".join(["replug", *sys.argv[1:]])[:200]
    return Writer(os.getpid(), socket.gethostname(), boot, command, time.strftime("%Y-%m-%d %H:%M:%S"), uuid4().hex)


@contextmanager
def _recorded(descriptor: int) -> Iterator[None]:
    _write(descriptor, _this_process())
    yield


@contextmanager
def _lease(folder: Path, descriptor: int, has_locks: bool) -> Iterator[None]:
    """Wait until the one before is known to be gone, take the lease, and keep it while the block runs."""
    own, before = _this_process(), _read(descriptor)
    if before is not None and not (has_locks and own.boot and before.boot == own.boot):
        _require_gone(folder, descriptor, before)  # of this machine's processes the lock itself tells
    _write(descriptor, own)
    time.sleep(SETTLE_SECONDS)
    if (other := _read(descriptor)) != own:
        raise _refusal(folder, other)
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(folder, descriptor, own, ended), name="lease", daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()


def _require_gone(folder: Path, descriptor: int, before: Writer) -> None:
    log.info(f"{folder} was written by {before}; watching for {LEASE_SECONDS:g} s whether it still is")
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_SECONDS, LEASE_SECONDS) / 5)
        if (found := _read(descriptor)) != before:
            raise _refusal(folder, found)


def _beat(folder: Path, descriptor: int, own: Writer, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        found = _read(descriptor)
        if found is None or found.lease != own.lease:
            _give_up(f"replug: {folder} was taken over by {found}, while this process was silent; nothing is written")
            return
        _write(descriptor, replace(own, beats=found.beats + 1))


def _give_up(reason: str) -> None:
    """At once: what is written from here on would be mixed with another's."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def _read(descriptor: int) -> Writer | None:
    """None where nobody has written the file yet, or it is no such record."""
    try:
        return Writer(**json.loads(os.pread(descriptor, RECORD_BYTES, 0)))
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, writer: Writer) -> None:
    record = json.dumps(asdict(writer))
    os.pwrite(descriptor, record.encode()[: RECORD_BYTES - 1].ljust(RECORD_BYTES - 1) + b"\n", 0)
