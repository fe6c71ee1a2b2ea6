"""Where raw texts come from, and what they are called."""

import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from replug.data.hashing import content_hash
from replug.data.sources import formats as package
from replug.data.sources import shards
from replug.data.sources.built_in_texts import MIN_CHARACTERS, PACKAGE_TEXTS
from replug.data.sources.formats import Format, format_of_file, formats, holds_rows
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.sources.shards import content_sha256, plan_source_shards, read_source_shard, source_fingerprint
from tests.support.preparing import contents, prepare, rows_of, write_jsonl

PILE = FieldMap("text", "meta.id", "meta.pile_set_name")


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


def test_dots_reach_into_nested_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one", "meta": {"id": 5, "pile_set_name": "Books"}}, {"text": "two", "meta": "none"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path, PILE) == [SourceText("5", "one", "Books"), unnamed("two")]


def test_another_field_may_hold_the_text(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": {"en": "one"}}\n'))
    assert read(path, FieldMap(text="body.en")) == [unnamed("one")]


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


def test_hidden_folders_are_passed_over(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff\xfe")
    (tmp_path / "a.txt").write_text("one")
    assert [text.id for text in read(tmp_path)] == ["a.txt"]


def test_the_stand_in_texts_are_the_same_at_every_call():
    texts = read("stand_in")
    assert texts == read("stand_in")
    assert len({text.id for text in texts}) == len(texts)
    assert {text.domain for text in texts} == {"even", "odd"}


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


PAIRS = '''
"""`id: text` on each line."""

from replug.data.sources.formats import row_format
from replug.data.sources.lines import byte_ranges, read_lines


def plan(path, shard_bytes):
    return byte_ranges("pairs", path, shard_bytes)


def rows(source_shard, fields):
    for line in read_lines(source_shard):
        if isinstance(line, tuple):
            identifier, _, text = line[1].decode().strip().partition(": ")
            yield line[0], {"id": identifier, "text": text}
        else:
            yield line


FORMAT = row_format("pairs", (".pairs",), plan, rows)
'''

COUNTING = '''
"""`counting:N`, which is no file."""

from replug.data.sources.formats import Format
from replug.data.sources.records import SourceShard, SourceText


def plan(source, shard_bytes):
    return [SourceShard(0, "counting", (source,), 0)]


def read(source_shard, fields):
    for number in range(int(source_shard.names[0].partition(":")[2])):
        yield number, SourceText(str(number), f"text {number}", "all")


FORMAT = Format("counting", plan, read, claims=lambda source: source.startswith("counting:"))
'''


@pytest.fixture
def add_format(tmp_path, monkeypatch) -> Iterator:
    """Writes a module where the others are found, and forgets it afterwards."""
    added: list[str] = []
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "formats")])

    def add(name: str, code: str) -> None:
        (tmp_path / "formats").mkdir(exist_ok=True)
        (tmp_path / f"formats/{name}.py").write_text(code)
        added.append(f"{package.__name__}.{name}")
        formats.cache_clear()

    yield add
    formats.cache_clear()
    for name in added:
        sys.modules.pop(name, None)
        vars(package).pop(name.rpartition(".")[2], None)


@pytest.mark.parametrize(
    ("name", "expected", "rows"),
    [
        ("a.jsonl", "jsonl", True),
        ("a.JSON.gz", "jsonl", True),
        ("a.tsv.zst", "tsv", True),
        ("a.parquet", "parquet", True),
        ("a.txt", "text", False),
        ("a.txt.gz", "text", False),
        ("a.csv", None, False),
        ("a", None, False),
    ],
)
def test_a_files_format_is_told_by_its_suffix(name, expected, rows):
    found = format_of_file(Path(name))
    assert (found and found.name, holds_rows(Path(name))) == (expected, rows)


def test_a_new_format_of_rows_is_one_file(add_format, tmp_path, monkeypatch):
    rows = [{"id": row["id"], "text": row["text"]} for row in rows_of(60)]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.pairs").write_text("".join(f"{row['id']}: {row['text']}\n" for row in rows))
    add_format("pairs", PAIRS)
    monkeypatch.setattr("replug.data.sources.shards.SOURCE_SHARD_BYTES", 1000)
    assert len(plan_source_shards(str(tmp_path / "raw/a.pairs"))) > 10
    assert read(tmp_path / "raw") == [SourceText(row["id"], row["text"], "all") for row in rows]
    made = prepare(tmp_path / "pairs", tmp_path / "raw")
    same = prepare(tmp_path / "jsonl", write_jsonl(tmp_path / "rows.jsonl", rows))
    assert contents(made.folder) == contents(same.folder)


def test_a_new_source_that_is_no_file_is_one_file(add_format):
    add_format("counting", COUNTING)
    assert isinstance(formats()["counting"], Format)
    assert [text.id for text in read("counting:3")] == ["0", "1", "2"]
    assert source_fingerprint("counting:3") is None


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
