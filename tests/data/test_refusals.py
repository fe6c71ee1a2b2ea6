"""Refused data, by key: each refusal names the file, its line or row, and the field or format that is wrong."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replug.config.errors import UserError
from replug.data.rows import read_documents, read_examples
from replug.data.sources import records as lines
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import plan_source, read_source_shard

ROWS = [{"id": "a", "text": 'The Rhine, "Rhein",\nflows'}, {"id": "b", "text": "through Basel; ünd"}]
ROW = b'{"id": "a", "text": "The Rhine flows through Basel."}\n'
CSV = 'id,text\na,"The Rhine, ""Rhein"",\nflows"\nb,through Basel; ünd\n'.encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
PAGE = b"<!doctype html><p>404, not found</p>"
TWICE = pa.table([pa.array(["1"]), pa.array(["2"]), pa.array(["one"])], names=["id", "id", "text"])


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def read_source(source: Path) -> None:
    for shard in plan_source(str(source), FieldMap()).shards:
        for _, item in read_source_shard(shard, FieldMap()):
            assert not hasattr(item, "reason"), str(item)


def question(*rows: dict) -> bytes:
    return "".join(json.dumps({"question": "which river", **row}) + "\n" for row in rows).encode()


TABLE = pa.Table.from_pylist(ROWS)
OBJECT, ARRAY = json.dumps(ROWS[0], indent=1).encode(), json.dumps(ROWS).encode()
CORPUS = {
    "an array cut short": ("a.json", b'[{"id": 1, "text": "x"}, {"id": 2', r"a\.json, row 2: not valid JSON"),
    "an array of texts": ("a.json", b'["x"]', r"a\.json, row 1: .* found str"),
    "a field twice in an array": ("a.json", b'[{"a": 1, "a": 2}]', r"row 1: .* two fields named 'a'"),
    "a field twice": ("a.jsonl", b'{"id": 1, "text": "x", "text": "y"}\n', r"a\.jsonl:1: .* two fields named 'text'"),
    "half a pair": ("a.jsonl", b'{"id": 1, "text": "x \\ud83d"}\n', r"a\.jsonl:1: field 'text' holds half a surrogate"),
    "CSV with a row too short": ("a.csv", b"id,text\n1,x\n\n2\n", r"a\.csv:4: 1 columns, the header has 2"),
    "CSV with an open quote": ("a.csv", b'id,text\n1,"x\n', r"a\.csv:2: not valid CSV"),
    "CSV in latin-1": ("a.csv", b"id,text\n1,caf\xe9\n", r"a\.csv:2: not UTF-8"),
    "CSV with a column twice": ("a.csv", b"id,id\n1,2\n", r"a\.csv:1: .* two columns named 'id'"),
    "a column without a name": ("a.csv", b"id,text,\n1,x,Rhine.\n", r"a\.csv:2: .* holds 'Rhine\.'"),
    "TSV without a text": ("a.tsv", b"id\tpassage\n1\tx\n", r"a\.tsv:2 \(id 1\): field 'text' .* id, passage"),
    "TSV without rows": ("a.tsv", b"id\ttext\n", "holds no documents"),
    "half a Parquet file": ("a.parquet", parquet(TABLE)[:-9], r"a\.parquet: no whole Parquet file"),
    "half a gzip file": ("a.json.gz", gzip.compress(ARRAY)[:-12], r"a\.json\.gz: unreadable"),
    "a program": ("a.jsonl", b"\x7fELF\x02\x01\x01" + bytes(90), r"a\.jsonl is, .* binary"),
    "another name": ("a.jsonl", b'{"id": "1", "contents": "x"}\n', r"a\.jsonl:1 .*'text' is missing; .* contents"),
    "null as id": ("a.jsonl", b'{"id": null, "text": "x"}\n', r"a\.jsonl:1: field 'id' is null"),
    "a missing file": ("gone.jsonl", None, r"gone\.jsonl does not exist"),
}
EXAMPLES = {
    "null": (question({"answers": None}), "field 'answers' is null"),
    "MS MARCO's": (question({"answers": ["No Answer Present."]}), "field 'answers' is 'No Answer Present.'"),
    "SQuAD's": (question({"answers": {"text": [], "answer_start": []}}), "field 'answers' must be a list of texts"),
    "no answers": (question({"answers": []}), r"rows\.jsonl:1: field 'answers' must be a list of texts"),
    "none behind one": (question({"answer": "Rhine"}, {}), r"rows\.jsonl:2: .* no answer, but that of .*:1 has one"),
    "one behind none": (question({}, {"answer": "Rhine"}), r"rows\.jsonl:2: .* an answer, but that of .* none"),
    "a context without an answer": (question({"context": "A passage."}), "'continuation' .* question, context"),
}
SOURCES = {
    "a table with commas": ({"a.jsonl": CSV}, r"a\.jsonl:1: not valid JSON"),
    "Zip": ({"a.jsonl": b"PK\x03\x04" + bytes(90)}, r"a\.jsonl is, .* Zip"),
    "rows with another field": (
        {"a.json": b'{"contents": "one"}\n'},
        r"a\.json .* contents and none with 'text'",
    ),
    "a pointer": ({"README.md": b"a", "a.parquet": LFS}, r"a\.parquet is, .* Git LFS, .*git lfs pull"),
    "UTF-16": ({"a.tsv": "id\ttext\n".encode("utf-16")}, r"a\.tsv is, .* UTF-16; expected JSON Lines"),
    "a column of Parquet twice": ({"a.parquet": parquet(TWICE)}, r"a\.parquet has two columns named 'id'"),
}


@pytest.mark.parametrize("what", CORPUS)
def test_a_corpus_that_cannot_be_read_is_refused_with_its_place(what: str, tmp_path: Path) -> None:
    name, content, says = CORPUS[what]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("what", EXAMPLES)
def test_examples_that_lack_what_the_lm_predicts_are_refused(what: str, tmp_path: Path) -> None:
    content, says = EXAMPLES[what]
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_examples(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("what", SOURCES)
def test_a_source_that_cannot_be_read_is_refused_with_the_files_name(what: str, tmp_path: Path) -> None:
    files, says = SOURCES[what]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((UserError, AssertionError), match=says):
        read_source(tmp_path)


@pytest.mark.parametrize("read", [lambda path: list(read_documents(path)), read_source])
def test_a_line_has_a_bound(read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "text": "short"}\n' + b'{"id": 2, "text": "' + b"x" * 10**6 + b'"}\n'))
    with pytest.raises((UserError, AssertionError), match=r"docs\.jsonl\.gz:2: the line is longer than 100 bytes"):
        read(path)


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([2**61] * 3, pa.timestamp("us")),
        pa.array([[[1]], None, []], pa.list_(pa.list_(pa.int8()))),
        pa.array([b"\xff\xfe"] * 3, pa.binary()),
    ],
    ids=lambda array: str(array.type),
)
def test_ids_of_any_type_are_taken_or_rejected_and_never_a_traceback(ids: pa.Array, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ids, "text": ["one", "two", "three"]}), tmp_path / "a.parquet")
    [shard] = plan_source(str(tmp_path / "a.parquet"), FieldMap()).shards
    assert list(read_source_shard(shard, FieldMap()))
