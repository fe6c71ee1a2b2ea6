"""Where raw texts come from, and what they are called."""

import json
import os
import time
from pathlib import Path

import datasets
import pytest

from replug.data.hashing import content_hash
from replug.data.sources import shards
from replug.data.sources.built_in_texts import MIN_CHARACTERS, PACKAGE_TEXTS
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.sources.shards import content_sha256, plan_source_shards, read_source_shard, source_fingerprint


def read(source: object, fields: FieldMap | None = None) -> list[SourceText]:
    texts = [
        item
        for source_shard in plan_source_shards(str(source))
        for _, item in read_source_shard(source_shard, fields or FieldMap())
    ]
    assert not any(isinstance(text, Rejected) for text in texts)
    return texts


def unnamed(text: str, domain: str = "all") -> SourceText:
    return SourceText(content_hash(text).hex(), text, domain, named=False)


def test_rows_without_id_and_domain_are_called_by_their_words_and_of_one_domain(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read(path) == [unnamed("one"), unnamed("two")]
    assert len({text.id for text in read(path)}) == 2


def test_a_folders_texts_come_sorted_with_the_first_folder_as_domain(tmp_path):
    for name in ("b/deep/2.txt", "b/1.md", "a/1.txt", "top.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name + " 🙂", encoding="utf-8")
    assert [(text.id, text.text, text.domain) for text in read(tmp_path)] == [
        ("a/1.txt", "a/1.txt 🙂", "a"),
        ("b/1.md", "b/1.md 🙂", "b"),
        ("b/deep/2.txt", "b/deep/2.txt 🙂", "b"),
        ("top.txt", "top.txt 🙂", "all"),
    ]


def test_texts_of_a_package_carry_its_name_and_short_ones_are_left_out(monkeypatch):
    long = "x" * MIN_CHARACTERS
    monkeypatch.setitem(PACKAGE_TEXTS, "one", lambda: iter([("a", long), ("b", long[1:])]))
    monkeypatch.setitem(PACKAGE_TEXTS, "two", lambda: iter([("a", long)]))
    assert read("package:two+one") == [SourceText("two/a", long, "two"), SourceText("one/a", long, "one")]


def test_a_dataset_of_the_hub_is_streamed_with_its_nested_fields(tmp_path, monkeypatch):
    """Rows in the Pile's form, from a local file in place of the hub; the loading is the library's own."""
    rows = [{"text": f"text {i}", "meta": {"pile_set_name": name}} for i, name in enumerate(("ArXiv", "Github"))]
    path = tmp_path / "pile.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, load = [], datasets.load_dataset

    def load_local(name, configuration=None, **options):
        asked.append((name, configuration, options))
        return load("json", data_files=str(path), cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_local)
    texts = read("monology/pile-uncopyrighted", FieldMap(domain="meta.pile_set_name"))
    assert asked[0] == ("monology/pile-uncopyrighted", None, {"streaming": True})
    assert asked == asked[:1] * len(asked)  # once to count its shards, once for each
    assert texts == [unnamed("text 0", "ArXiv"), unnamed("text 1", "Github")]


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
