"""Files are replaced whole, beside and renamed, and nothing that lies in the way is written through."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from replug.config.errors import UserError
from replug.data import files
from replug.data.files import link_equal_files, read_json, replace_file, shared_file_system


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
