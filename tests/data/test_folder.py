"""The contract of folders: one writer, the same inputs, a manifest that names every wrong file."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from replug.config.errors import RunError, UserError
from replug.data import files
from replug.data import folder as folder_module
from replug.data.files import replace_file, shared_file_system, writing
from replug.data.folder import INPUTS, LOCK, Folder, manifest_problems, sole_writer

HOLD = """
import sys, time
from pathlib import Path
from replug.data.folder import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
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
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert not (folder / LOCK).exists()


def test_a_lock_on_a_file_that_its_holder_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, removed = folder_module.FileLock.acquire, []

    def acquire_and_lose(lock: folder_module.FileLock) -> object:
        found = acquire(lock)
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        return found

    monkeypatch.setattr(folder_module.FileLock, "acquire", acquire_and_lose)
    with sole_writer(tmp_path):
        assert f"process {os.getpid()}" in refused(tmp_path)


def test_a_link_in_the_place_of_the_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "mine")
    assert "cannot be written" in refused(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious"


INPUT_VALUES = {"data.seed": 3, "lm": "a hash", "sizes": (1, 2)}


def made(path: Path) -> Folder:
    return Folder(path, "set", key="data.out", fix_hint="make it again", others=("logs", "*.tmp"))


@pytest.fixture
def finished(tmp_path: Path) -> Folder:
    folder = made(tmp_path / "set")
    folder.claim(INPUT_VALUES)
    (folder.path / "sub").mkdir()
    for name in ("a", "sub/b"):
        (folder.path / name).write_text(name)
    folder.finish(["a", "sub/b"], {"counts": {"rows": 2}})
    return folder


def test_a_folder_is_claimed_again_for_the_same_inputs_and_finished_once(finished: Folder) -> None:
    assert made(finished.path).inputs == {"data.seed": 3, "lm": "a hash", "sizes": [1, 2]}
    finished.claim(INPUT_VALUES)
    assert (
        finished.is_finished and finished.manifest()["counts"] == {"rows": 2} and manifest_problems(finished.path) == []
    )
    assert set(finished.manifest()["files"]) == {"a", "sub/b", INPUTS}


@pytest.mark.parametrize("other", [{"data.seed": 4}, {"lm": None}, {"new": 1}])
def test_other_inputs_are_refused_by_the_first_that_differs_with_both_values(finished: Folder, other: dict) -> None:
    ((name, value),) = other.items()
    said = f"{name} is {value!r}, but the set in {finished.path} was made with {INPUT_VALUES.get(name)!r}"
    for ask in (finished.claim, finished.check):
        with pytest.raises(UserError) as caught:
            ask({**INPUT_VALUES, **other})
        assert said in str(caught.value) and "another data.out, or remove the folder" in str(caught.value)
    with pytest.raises(UserError, match="lm is None, but the set"):
        finished.claim({"data.seed": 3, "sizes": [1, 2]})
    finished.check({"data.seed": 3}, are_all=False)
    assert finished.is_finished


def test_a_folder_of_somebody_else_of_another_kind_or_format_is_refused(tmp_path: Path, finished: Folder) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("logs", "x.tmp", "photo.jpg"):
        (tmp_path / "mine" / name).write_text("")
    with pytest.raises(UserError, match=r"holds photo\.jpg, which is not part of the set; give another data\.out"):
        made(tmp_path / "mine").claim(INPUT_VALUES)
    (tmp_path / "mine/photo.jpg").unlink()
    made(tmp_path / "mine").claim(INPUT_VALUES)
    with pytest.raises(UserError, match="is a file; expected a folder"):
        made(tmp_path / "mine/x.tmp").claim({})
    with pytest.raises(UserError, match="holds the set; expected the run; give another run_dir"):
        Folder(finished.path, "run", key="run_dir", fix_hint="").claim(INPUT_VALUES)
    with pytest.raises(UserError, match="written by another version of replug"):
        Folder(finished.path, "set", key="data.out", fix_hint="", format=2).manifest()


def test_missing_and_changed_files_are_named_and_required_ones_refused(finished: Folder) -> None:
    finished.require()
    (finished.path / "a").write_text("A")
    (finished.path / "sub/b").unlink()
    said = ["a is damaged: its checksum differs", "sub/b is missing"]
    assert manifest_problems(finished.path) == [f"{finished.path}/{line}" for line in said]
    reader = made(finished.path)
    reader.require("unlisted")
    with pytest.raises(UserError, match="a is damaged: its checksum differs, so it is another set; make it again"):
        reader.require("a", meaning=", so it is another set")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_where_a_folder_cannot_be_locked_nobody_writes_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks, known by name or not: else two processes would be its sole writers."""

    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UserError, match="cannot be written: "), sole_writer(tmp_path / "run"):
        pytest.fail("it was not locked")


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_link_in_the_way_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for name in ("report.html", "report.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    replace_file(tmp_path / "report.html", b"ours")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "ours" and not (tmp_path / "report.html").is_symlink()


MOUNTS = {"/": "ext4", "/home": "nfs4", "/home/local": "xfs", "/scratch": "lustre", "/with blank": "fuse.sshfs"}
LIE_ON = {
    "/data/scores.sqlite": None,
    "/home/me/scores.sqlite": "nfs4",
    "/home/local/scores.sqlite": None,
    "/homes/scores.sqlite": None,
    "/scratch/run": "lustre",
    "/with blank/x": "fuse.sshfs",
    "/over/x": None,  # what was mounted last hides the other
}


def test_the_mount_nearest_above_a_path_says_what_it_lies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [*MOUNTS.items(), ("/over", "nfs"), ("/over", "tmpfs")]
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: found)
    assert {path: shared_file_system(Path(path)) for path in LIE_ON} == LIE_ON


FULL_DISK = [
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),  # torch.save
    Exception("No space left on device (os error 28)"),  # of tokenizers
]


@pytest.mark.parametrize("error", FULL_DISK, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_named_whoever_writes_and_leaves_nothing_half_written(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"lm.partial cannot be written: .+"), writing(tmp_path / "lm.partial"):
        (tmp_path / "lm.partial").mkdir()
        (tmp_path / "lm.partial/model.safetensors").write_bytes(b"half")
        raise error
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="a mistake of ours"), writing(tmp_path / "lm.partial"):
        raise ValueError("a mistake of ours")
