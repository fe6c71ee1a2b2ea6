"""One writer for a folder: the second is refused by name, kill -9 frees it; a lease where there are no locks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
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
    assert (folder / NAME).is_file(), "what was killed leaves its record"
    with sole_writer(folder):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    assert not (folder / NAME).exists()


def test_one_process_cannot_take_a_folder_twice_either(tmp_path: Path) -> None:
    with sole_writer(tmp_path):
        assert f"process {os.getpid()}" in refused(tmp_path)
    with sole_writer(tmp_path):
        pass


def test_a_folder_named_twice_is_locked_once_and_all_are_freed_where_one_is_taken(tmp_path: Path) -> None:
    free, taken = tmp_path / "free", tmp_path / "taken"
    with sole_writer(free, free):
        pass
    with sole_writer(taken), pytest.raises(UserError), sole_writer(free, taken):
        pass
    with sole_writer(free):
        pass


def test_what_was_refused_or_ended_by_an_error_leaves_no_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), sole_writer(tmp_path / "new"):
        raise ZeroDivisionError
    assert not (tmp_path / "new").exists()
    with sole_writer(tmp_path / "kept"):
        (tmp_path / "kept/file").touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} cannot be written: File exists" in refused(tmp_path / "file")
    assert "cannot be written: Not a directory" in refused(tmp_path / "file/below")


def test_a_link_in_the_place_of_the_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "mine")
    assert "cannot be written" in refused(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious"


# A file system that several machines share ------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no locks of its own."""

    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folder_lock, "shared_file_system", lambda _: "nfs4")
    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(folder_lock, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(folder_lock, "SETTLE_SECONDS", 0.05)


def left_by_another_machine(folder: Path) -> folder_lock.Writer:
    other = replace(folder_lock._this_process(), pid=7, host="far", boot="another")
    folder.mkdir()
    (folder / NAME).write_text(json.dumps(asdict(other)).ljust(folder_lock.RECORD_BYTES))
    return other


def test_a_lease_that_beats_is_respected(tmp_path: Path, shared: None) -> None:
    with sole_writer(tmp_path):
        assert f"process {os.getpid()}" in refused(tmp_path)
        assert json.loads((tmp_path / NAME).read_text())["beats"] > 0


def test_a_lease_that_no_longer_beats_is_taken_over(tmp_path: Path, shared: None) -> None:
    left_by_another_machine(tmp_path / "run")
    began = time.monotonic()
    with sole_writer(tmp_path / "run"):
        assert time.monotonic() - began >= 0.3
        assert json.loads((tmp_path / "run" / NAME).read_text())["host"] == os.uname().nodename


def test_of_two_that_write_at_once_one_goes_on(tmp_path: Path, shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(_: float) -> None:
        left_by_another_machine(tmp_path / "run") if not (tmp_path / "run").exists() else None
        other = replace(folder_lock._this_process(), pid=7, host="far")
        (tmp_path / "run" / NAME).write_text(json.dumps(asdict(other)).ljust(folder_lock.RECORD_BYTES))

    monkeypatch.setattr(folder_lock.time, "sleep", overtaken)
    assert "process 7 on far" in refused(tmp_path / "run")


def test_a_writer_that_was_overtaken_while_it_was_silent_ends(
    tmp_path: Path, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(folder_lock, "_give_up", said.append)
    with sole_writer(tmp_path):
        other = replace(folder_lock._this_process(), pid=7, host="far")
        (tmp_path / NAME).write_text(json.dumps(asdict(other)).ljust(folder_lock.RECORD_BYTES))
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
    assert f"{tmp_path} was taken over by process 7 on far" in said[0]
