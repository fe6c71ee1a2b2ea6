"""Files are replaced whole, beside and renamed, and nothing that lies in the way is written through."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from replug.config.errors import RunError, UserError
from replug.data import files
from replug.data.files import link_equal_files, read_json, replace_file, shared_file_system, writing


def test_a_link_in_the_way_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for name in ("report.html", "report.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    replace_file(tmp_path / "report.html", b"ours")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "ours" and not (tmp_path / "report.html").is_symlink()


def test_equal_files_are_kept_once_and_others_stay(tmp_path: Path) -> None:
    contents = {"a": b"same", "b": b"same", "c": b"else"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the second time there is nothing to do
        link_equal_files(tmp_path.iterdir())
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents
        assert (tmp_path / "a").samefile(tmp_path / "b") and (tmp_path / "c").stat().st_nlink == 1


def test_json_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "lm.json").write_text('{"identity": "a')
    with pytest.raises(UserError, match=r"lm\.json is damaged, it is not valid JSON .*; mend it"):
        read_json(tmp_path / "lm.json", "mend it")


MOUNTS = [
    ("/", "ext4"),
    ("/home", "nfs4"),
    ("/home/local", "xfs"),
    ("/scratch", "lustre"),
    ("/with blank", "fuse.sshfs"),
]
MOUNTS += [("/over", "nfs"), ("/over", "tmpfs")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/scores.sqlite", None),
        ("/home/me/scores.sqlite", "nfs4"),
        ("/home/local/scores.sqlite", None),
        ("/homes/scores.sqlite", None),
        ("/scratch/run", "lustre"),
        ("/with blank/x", "fuse.sshfs"),
        ("/over/x", None),  # what was mounted last hides the other
    ],
)
def test_the_mount_nearest_above_a_path_says_what_it_lies_on(
    path: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint=place, fstype=found) for place, found in MOUNTS]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: mounts)
    assert shared_file_system(Path(path)) == kind


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


def test_a_file_in_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone/a.json.partial cannot be written: No such file or directory"):
        replace_file(tmp_path / "gone/a.json", b"{}")
