"""Folders that we wrote say what their files were, and whoever reads one of them later reads the same."""

import json
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data.manifest import NAME, add_checksum, checksum_problems, require_checksums, write_checksums, write_last
from replug.models.encoder import Encoder
from replug.models.encoder_files import POOLING_FILE
from replug.models.stand_in_encoder import write_stand_in_encoder


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_a_file_that_is_another_one_or_gone_is_named_and_a_folder_without_checksums_is_taken_as_it_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    assert checksum_problems(tmp_path) == []
    write_checksums(tmp_path)
    require_checksums(tmp_path, "mend")
    flip(tmp_path / "a", 0)
    (tmp_path / "b").unlink()
    assert checksum_problems(tmp_path) == [
        f"{tmp_path / 'a'} is damaged: its checksum differs",
        f"{tmp_path / 'b'} is missing",
    ]
    assert checksum_problems(tmp_path, ["b"]) == [f"{tmp_path / 'b'} is missing"]
    with pytest.raises(UserError, match="a is damaged: its checksum differs; mend"):
        require_checksums(tmp_path, "mend")


def test_any_flip_in_the_checksums_themselves_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a")
    write_checksums(tmp_path)
    whole = (tmp_path / NAME).read_bytes()
    inside = range(whole.index(b'"'), whole.rindex(b'"') + 1)
    for place in inside:
        for bit in range(8):
            (tmp_path / NAME).write_bytes(whole)
            flip(tmp_path / NAME, place, bit)
            same = _read(tmp_path / NAME) == json.loads(whole)  # as where a blank between two names is another blank
            assert bool(checksum_problems(tmp_path)) != same, (place, bit)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_a_file_that_is_added_later_has_a_checksum_and_the_others_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a")
    write_checksums(tmp_path)
    flip(tmp_path / "weights", 0)
    (tmp_path / "README.md").write_text("b")
    add_checksum(tmp_path / "README.md")
    assert checksum_problems(tmp_path) == [f"{tmp_path / 'weights'} is damaged: its checksum differs"]
    flip(tmp_path / "README.md", 0)
    assert f"{tmp_path / 'README.md'} is damaged: its checksum differs" in checksum_problems(tmp_path)


def test_what_says_that_a_folder_is_finished_comes_after_its_checksum(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("table")
    write_last(tmp_path / "results.json", {"a": 1}, [tmp_path / "table.md", tmp_path / "not_there"])
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}
    assert sorted(json.loads((tmp_path / NAME).read_text())["files"]) == ["results.json", "table.md"]
    require_checksums(tmp_path, "mend")


def test_one_flip_in_any_file_of_an_encoder_that_we_wrote_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path / "own")
    Encoder(str(tmp_path / "own")).save(tmp_path / "saved")
    files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file() and path.name != NAME]
    assert {"model.safetensors", "tokenizer.json", "config.json"} < {path.name for path in files}
    assert tmp_path / "saved" / POOLING_FILE in files
    for path in files:
        whole = path.read_bytes()
        flip(path, len(whole) // 2)
        with pytest.raises(UserError, match=f"{path} is damaged: its checksum differs; bring it back"):
            Encoder(str(tmp_path / "saved"))
        path.write_bytes(whole)
    assert Encoder(str(tmp_path / "saved")).dim == Encoder(str(tmp_path / "own")).dim
