"""The contract of folders: one writer, the same inputs, a manifest that names every wrong file to the flipped bit."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from replug.config.errors import RunError, UserError
from replug.data import files
from replug.data import folder as folder_module
from replug.data.files import replace_file, shared_file_system, writing
from replug.data.folder import CHECKSUMS, INPUTS, LOCK, Folder, file_sum, manifest_problems, sole_writer
from replug.data.prepare.sets import prepare_rows
from replug.data.store import PreparedSet
from replug.data.tokenizing import TokenIds, word_tokenizer
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from tests.support.preparing import write_jsonl

HOLD = """
import sys, time
from pathlib import Path
from replug.data.folder import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught, sole_writer(folder):
        pass
    return str(caught.value)


def test_a_second_process_is_refused_by_the_name_of_the_first_and_kill_frees_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        said = refused(folder)
        assert f"{folder} is being written by process {process.pid} on {os.uname().nodename} since " in said
        assert "wait for its end, or give another one" in said
        process.kill()
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
    assert finished.is_finished and manifest_problems(finished.path) == []
    assert finished.manifest()["counts"] == {"rows": 2}
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


MOUNTS = [
    ("/", "ext4"),
    ("/home", "nfs4"),
    ("/home/local", "xfs"),
    ("/scratch", "lustre"),
    ("/with blank", "fuse.sshfs"),
]
MOUNTS += [("/over", "nfs"), ("/over", "tmpfs")]  # what was mounted last hides the other
LIE_ON = {"/data/x": None, "/home/me/x": "nfs4", "/home/local/x": None, "/homes/x": None, "/scratch/x": "lustre"}
LIE_ON |= {"/with blank/x": "fuse.sshfs", "/over/x": None}


def test_the_mount_nearest_above_a_path_says_what_it_lies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in MOUNTS]
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


# One flipped bit ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    documents = [{"id": f"d{i}", "text": f"a text of number {i}"} for i in range(5)]
    corpus = write_jsonl(folder / "corpus.jsonl", documents)
    train, heldout = (
        write_jsonl(folder / f"{name}.jsonl", [{"context": f"{name} {i}", "continuation": " ends"} for i in range(3)])
        for name in ("queries", "heldout")
    )
    prepare_rows(corpus, train, heldout, folder / "set", {}, TokenIds(word_tokenizer(r"\S+"), 16, 10))
    return folder / "set"


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "set"))


def flip(path: Path, place: float, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


def read_all(folder: Path) -> None:
    """All that a run reads."""
    prepared = PreparedSet(folder)
    prepared.queries.examples()
    prepared.heldout.examples()
    prepared.corpus.texts(range(5))
    prepared.corpus.token_ids(range(5))


FILES = [
    *("queries.arrow", "heldout.arrow", "manifest.json", "inputs.json", "documents/tokens.json"),
    *("documents/00000.arrow", "documents/00000.tokens.npy", "documents/00000.ends.npy"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named_by_who_reads_the_file_and_by_verify(prepared: Path, name: str) -> None:
    for place, bit in ((0.0, 0), (0.5, 6), (1.0, 0)):
        flip(prepared / name, place, bit)
        with pytest.raises(UserError, match=name):
            read_all(prepared)
        problems = manifest_problems(prepared)
        assert problems and name in problems[0]
        flip(prepared / name, place, bit)
    read_all(prepared)
    assert manifest_problems(prepared) == []
    assert sorted(FILES) == sorted(str(p.relative_to(prepared)) for p in prepared.rglob("*") if p.is_file())


def test_a_manifest_whose_proof_or_checksums_were_changed_is_refused(prepared: Path) -> None:
    shutil.copy(prepared / "heldout.arrow", prepared / "queries.arrow")
    content = json.loads((prepared / "manifest.json").read_text())
    content["files"]["queries.arrow"] = file_sum(prepared / "queries.arrow")
    (prepared / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest\.json is damaged: its content differs from its own checksum"):
        PreparedSet(prepared)


def test_one_flip_in_any_file_of_an_encoder_that_we_wrote_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path / "own")
    Encoder(str(tmp_path / "own")).save(tmp_path / "saved")
    files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file() and path.name != CHECKSUMS]
    assert {"model.safetensors", "tokenizer.json", "config.json"} < {path.name for path in files}
    assert tmp_path / "saved" / "1_Pooling/config.json" in files
    for path in files:
        whole = path.read_bytes()
        flip(path, 0.5)
        with pytest.raises(UserError, match=f"{path} is damaged: its checksum differs; bring it back"):
            Encoder(str(tmp_path / "saved"))
        path.write_bytes(whole)
    assert Encoder(str(tmp_path / "saved")).dim == Encoder(str(tmp_path / "own")).dim
