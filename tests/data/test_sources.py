"""Where raw texts come from, and what they are called."""

import bz2
import csv
import gzip
import io
import json
import os
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replug.data.hashing import content_hash
from replug.data.sources import shards
from replug.data.sources.built_in_texts import MIN_CHARACTERS, PACKAGE_TEXTS
from replug.data.sources.records import FieldMap, SourceText
from replug.data.sources.shards import content_sha256, plan_source, read_source_shard, source_fingerprint
from tests.support.preparing import contents, prepare, rows_of, write_jsonl


def read(source: object, fields: FieldMap | None = None) -> list:
    fields = fields or FieldMap()
    source_shards = plan_source(str(source), fields).shards
    return [item for source_shard in source_shards for _, item in read_source_shard(source_shard, fields)]


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
    first, of_folder = content_sha256(path), source_fingerprint(str(path))
    assert content_sha256(path) == first and len(read) == 1
    time.sleep(0.02)  # more than the step of the clock of a file system
    edit(path, 50)
    assert content_sha256(path) != first and len(read) == 2 and source_fingerprint(str(path)) != of_folder
    (kept,) = (tmp_path / "cache/file_hashes").iterdir()
    kept.write_text("half of it")
    assert content_sha256(path) != first and len(read) == 3


# Forms of sources ---------------------------------------------------------------------------------------

ROWS = rows_of(150)


@pytest.mark.parametrize("name", ["wiki.txt.gz", "wiki.txt.zst", "wiki.txt.bz2"])
def test_a_packed_text_is_the_text(name, tmp_path):
    content = b" = A =\none\n = B =\ntwo\n"
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda text: pa.compress(text, "zstd", asbytes=True)}
    (tmp_path / "wiki.txt").write_bytes(content)
    (tmp_path / name).write_bytes(pack[Path(name).suffix](content))
    for fields in (FieldMap(), FieldMap(new_text_at="^ = ")):
        plain, packed = read(tmp_path / "wiki.txt", fields), read(tmp_path / name, fields)
        assert [item.text for item in packed] == [item.text for item in plain]
        assert len(packed) == (2 if fields.new_text_at else 1)


@pytest.mark.parametrize("cut", [True, False])
def test_a_packed_text_that_is_damaged_or_too_long_is_named(cut, tmp_path):
    whole = gzip.compress(random.Random(0).randbytes(4000).hex().encode())
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2] if cut else whole)
    [found] = read(tmp_path / "a.txt.gz", FieldMap(max_characters=100))
    assert (found.reason.value, found.file) == (("unreadable_file" if cut else "too_long"), str(tmp_path / "a.txt.gz"))


def table(rows: list[dict], **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


def tsv(rows: list[dict]) -> bytes:
    """As DPR's psgs_w100.tsv."""
    body = io.StringIO()
    writer = csv.writer(body, delimiter="\t", lineterminator="\n")
    writer.writerow(["id", "text", "title", "domain"])
    writer.writerows([row["id"], row["text"], 'A "title"', row["domain"]] for row in rows)
    return body.getvalue().encode()


FORMS = {
    "Parquet of many row groups": {"a.parquet": table(ROWS, row_group_size=7)},
    "all kinds": {
        "z.parquet": table(ROWS[:50]),
        "y.tsv": tsv(ROWS[50:90]),
        "x/x.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS[90:]).encode(),
    },
}


def write_form(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_set_byte_for_byte(form, tmp_path, monkeypatch):
    plain = prepare(tmp_path / "plain", write_jsonl(tmp_path / "raw.jsonl", ROWS))
    monkeypatch.setattr(shards, "SOURCE_SHARD_BYTES", 1000)
    other = prepare(tmp_path / "other", write_form(tmp_path / "raw", FORMS[form]))
    assert contents(other.folder) == contents(plain.folder)


def test_a_pattern_of_folders_gives_texts_the_names_they_have_below_its_fixed_part(tmp_path):
    write_form(tmp_path / "raw", {f"{name}/a.txt": name.encode() for name in ("one", "two")})
    for source in (tmp_path / "raw/*/a.txt", tmp_path / "raw/*/*.txt", tmp_path / "raw"):
        assert [(t.id, t.text, t.domain) for t in read(source)] == [
            ("one/a.txt", "one", "one"),
            ("two/a.txt", "two", "two"),
        ]
    assert [(t.id, t.domain) for t in read(tmp_path / "raw/one/*.txt")] == [("a.txt", "all")]


def test_a_tree_of_texts_gives_the_same_in_source_shards_of_any_size(tmp_path, monkeypatch):
    files = {f"{row['domain']}/{row['id']}.txt": row["text"].encode() for row in ROWS}
    write_form(tmp_path / "raw", files)
    whole = read(tmp_path / "raw")
    assert {(t.id, t.text, t.domain) for t in whole} == {
        (name, text.decode(), name.split("/")[0]) for name, text in files.items()
    }
    monkeypatch.setattr(shards, "SOURCE_SHARD_BYTES", 3000)
    assert len(plan_source(str(tmp_path / "raw"), FieldMap()).shards) > 5
    assert read(tmp_path / "raw") == whole


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_source_shard_that_begins_right_at_a_line_takes_it_once(end, tmp_path, monkeypatch):
    lines = [json.dumps({"id": str(i), "text": "x" * (i % 5 + 1)}) for i in range(40)]
    (tmp_path / "a.jsonl").write_bytes(end.join(lines).encode())
    for size in range(1, 120, 7):
        monkeypatch.setattr(shards, "SOURCE_SHARD_BYTES", size)
        assert [text.id for text in read(tmp_path / "a.jsonl")] == [str(i) for i in range(40)]


# Datasets of the hub, and texts that run over many rows -------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A local folder that is taken for the dataset `corpus` of the hub."""
    monkeypatch.chdir(tmp_path)
    real = shards._files
    monkeypatch.setattr(shards, "_files", lambda source: None if source.split(":")[0] == "corpus" else real(source))
    return tmp_path / "corpus"


def test_a_dataset_of_the_hub_gives_the_same_set_as_its_rows_in_a_file(hub, tmp_path):
    for number, rows in enumerate((ROWS[:80], ROWS[80:])):
        write_form(hub, {f"train-0000{number}-of-00002.parquet": table(rows)})
    source_shards = plan_source("corpus", FieldMap()).shards
    assert [(source_shard.kind, source_shard.start) for source_shard in source_shards] == [("hub", 0), ("hub", 1)]
    prepared = prepare(tmp_path / "a", "corpus")
    plain = prepare(tmp_path / "b", write_jsonl(tmp_path / "raw.jsonl", ROWS))
    assert contents(prepared.folder) == contents(plain.folder)


def test_bad_rows_of_a_dataset_of_the_hub_are_counted_with_their_place_in_all_of_it(hub, tmp_path):
    for number, rows in enumerate((ROWS[:80], ROWS[80:])):
        write_jsonl(hub / f"train-0000{number}-of-00002.jsonl", [*rows, {"id": "bad", "text": ""}])
    prepared = prepare(tmp_path / "set", "corpus", max_rejected_share=1.0)
    cases = [json.loads(line) for line in (prepared.folder / "rejected.jsonl").read_text().splitlines()]
    assert [(case["file"], case["line"], case["reason"]) for case in cases] == [
        ("corpus", 81, "text_empty"),
        ("corpus", 152, "text_empty"),
    ]
