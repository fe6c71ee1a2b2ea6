"""Formats of sources: what each has to say, and that a new one is one file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replug.data.sources import formats as package
from replug.data.sources.formats import Format, format_of_file, formats, holds_rows
from replug.data.sources.records import FieldMap, SourceText
from replug.data.sources.shards import plan_source_shards, read_source_shard, source_fingerprint
from tests.support.preparing import contents, prepare, rows_of, write_jsonl

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


def read(source: object) -> list:
    return [item for shard in plan_source_shards(str(source)) for _, item in read_source_shard(shard, FieldMap())]


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
