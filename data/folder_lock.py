"""One writer for a folder: who writes it is said in the folder, and a second process is refused by that name.

`FOLDER/.writer.json` (of a file `FILE.writer.json`, beside it) holds the writer's process, machine and command, and
since when. On a disk of this machine the operating system locks it, and frees it with the process, also after kill -9.

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

from replug.config.errors import RunError, UserError
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
            held.enter_context(_removed_if_empty(folder))
            held.enter_context(_one(folder, folder / NAME))
        yield


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """A command that was refused leaves no empty folder behind."""
    is_new = not folder.exists()
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _one(what: Path, record: Path) -> Iterator[None]:
    descriptor, has_locks = _locked(what, record)
    try:
        with _lease(what, descriptor, has_locks) if shared_file_system(record) else _recorded(what, descriptor):
            try:
                yield
            finally:
                record.unlink(missing_ok=True)  # before it is freed: nobody else can have it by then
    finally:
        os.close(descriptor)


def _locked(what: Path, record: Path) -> tuple[int, bool]:
    """The descriptor of the locked record, and whether the file system has locks at all.

    Where the one before has just removed the record, the lock would be of a file without a name: it is taken anew.
    """
    while True:
        descriptor = _opened(what, record)
        try:
            has_locks = _lock(what, descriptor)
            if _is_still_there(record, descriptor):
                return descriptor, has_locks
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(what: Path, record: Path) -> int:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        return os.open(record, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}; give another one") from error


def _lock(what: Path, descriptor: int) -> bool:
    """Whether there are locks; raises UserError where another process has this one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _refusal(what, _read(descriptor)) from error
    except OSError as error:  # a shared file system without locks: the lease has to do
        log.info(f"{what} has no locks ({error.strerror}); who writes it is told by its record alone")
        return False
    return True


def _is_still_there(record: Path, descriptor: int) -> bool:
    try:
        return os.stat(record).st_ino == os.fstat(descriptor).st_ino  # noqa: PTH116 - beside its descriptor's
    except FileNotFoundError:
        return False


def _refusal(what: Path, writer: Writer | None) -> UserError:
    return UserError(f"{what} is being written by {writer or 'another process'}: wait for its end, or give another one")


def _this_process() -> Writer:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    command = " ".join(["replug", *sys.argv[1:]])[:200]
    return Writer(os.getpid(), socket.gethostname(), boot, command, time.strftime("%Y-%m-%d %H:%M:%S"), uuid4().hex)


@contextmanager
def _recorded(what: Path, descriptor: int) -> Iterator[None]:
    _write(what, descriptor, _this_process())
    yield


@contextmanager
def _lease(what: Path, descriptor: int, has_locks: bool) -> Iterator[None]:
    """Wait until the one before is known to be gone, take the lease, and keep it while the block runs."""
    own, before = _this_process(), _read(descriptor)
    if before is not None and not (has_locks and own.boot and before.boot == own.boot):
        _require_gone(what, descriptor, before)  # of this machine's processes the lock itself tells
    _write(what, descriptor, own)
    time.sleep(SETTLE_SECONDS)
    if (other := _read(descriptor)) != own:
        raise _refusal(what, other)
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(what, descriptor, own, ended), name="lease", daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()


def _require_gone(what: Path, descriptor: int, before: Writer) -> None:
    log.info(f"{what} was written by {before}; watching for {LEASE_SECONDS:g} s whether it still is")
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(BEAT_SECONDS, LEASE_SECONDS) / 5)
        if (found := _read(descriptor)) != before:
            raise _refusal(what, found)


def _beat(what: Path, descriptor: int, own: Writer, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        found = _read(descriptor)
        if found is None or found.lease != own.lease:
            _give_up(f"replug: {what} was taken over by {found}, while this process was silent; nothing is written")
            return
        _write(what, descriptor, replace(own, beats=found.beats + 1))


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


def _write(what: Path, descriptor: int, writer: Writer) -> None:
    record = json.dumps(asdict(writer)).encode()[: RECORD_BYTES - 1].ljust(RECORD_BYTES - 1) + b"\n"
    try:
        os.pwrite(descriptor, record, 0)
    except OSError as error:
        raise RunError(f"{what} cannot be written: {error.strerror or error}") from error
