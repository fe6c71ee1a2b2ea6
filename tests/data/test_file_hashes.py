"""A source is another one when any byte of it is, and large files are read once."""

import os
import time
from pathlib import Path

import pytest

from replug.data.sources import shards
from replug.data.sources.shards import content_sha256, source_fingerprint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path / "cache"))


def edit(path: Path, place: int) -> None:
    """By a byte, with the size and the time of change put back."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"X")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_edit_in_the_middle_of_a_file_makes_it_another_source(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "texts.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "a"}\n' * 300_000)  # 4 MB, of which the first and last are not the middle
    before = source_fingerprint(str(path.parent))
    edit(path, 2_000_000)
    assert source_fingerprint(str(path.parent)) != before


def test_a_large_file_is_read_again_only_where_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "LARGE_BYTES", 10)
    monkeypatch.setattr(shards, "SETTLED_NS", 0)
    read: list[Path] = []
    real = shards.file_sha256
    monkeypatch.setattr(shards, "file_sha256", lambda path: read.append(path) or real(path))
    path = tmp_path / "large"
    path.write_bytes(bytes(100))
    first = content_sha256(path)
    assert content_sha256(path) == first and len(read) == 1
    time.sleep(0.02)  # more than the step of the clock of a file system
    edit(path, 50)
    assert content_sha256(path) != first and len(read) == 2
    (kept,) = (tmp_path / "cache/file_hashes").iterdir()
    kept.write_text("half of it")
    assert content_sha256(path) != first and len(read) == 3


def test_what_was_hashed_just_now_is_not_taken_for_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGE_BYTES", 10)
    (tmp_path / "large").write_bytes(bytes(100))
    content_sha256(tmp_path / "large")
    assert not (tmp_path / "cache").exists()
