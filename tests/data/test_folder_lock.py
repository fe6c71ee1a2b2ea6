"""One writer for a folder: the second is refused by name, and kill -9 frees it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data import folder_lock
from replug.data.folder_lock import NAME, sole_writer

HOLD = """
import sys, time
from pathlib import Path
from replug.data.folder_lock import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught, sole_writer(folder):
        pass
    return str(caught.value)


def test_a_second_process_is_refused_by_the_name_of_the_first_and_kill_frees_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held_elsewhere(folder) as process:
        said = refused(folder)
        assert f"{folder} is being written by process {process.pid} on {os.uname().nodename} since " in said
        assert "wait for its end, or give another one" in said
        process.send_signal(signal.SIGKILL)
        process.wait()
    with sole_writer(folder):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    assert not (folder / NAME).exists()


def test_a_lock_on_a_file_that_its_holder_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, removed = folder_lock.FileLock.acquire, []

    def acquire_and_lose(lock: folder_lock.FileLock) -> object:
        found = acquire(lock)
        if not removed:
            removed.append((tmp_path / NAME).unlink())
        return found

    monkeypatch.setattr(folder_lock.FileLock, "acquire", acquire_and_lose)
    with sole_writer(tmp_path):
        assert f"process {os.getpid()}" in refused(tmp_path)


def test_a_folder_named_twice_is_locked_once_and_all_are_freed_where_one_is_taken(tmp_path: Path) -> None:
    free, taken = tmp_path / "free", tmp_path / "taken"
    with sole_writer(free, free):
        pass
    with sole_writer(taken), pytest.raises(UserError), sole_writer(free, taken):
        pass
    with sole_writer(free):
        pass


def test_a_link_in_the_place_of_the_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "mine")
    assert "cannot be written" in refused(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious"
