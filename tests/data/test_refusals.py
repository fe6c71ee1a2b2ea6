"""Data that cannot be taken: refused, or counted by reason and listed, with the file and its line or row."""

import gzip
import json
from pathlib import Path

import pytest

import replug.data.prepare.reading
import replug.data.sources.records
import replug.data.sources.shards
import replug.data.sources.texts
from replug.config.errors import UserError
from replug.data.rows import read_documents, read_examples
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.sources.shards import plan_source
from replug.data.sources.texts import read_items
from replug.data.store import PreparedSet
from tests.support.preparing import contents, jsonl, parquet, prepare, rows_of, write_files, write_jsonl

GOOD = rows_of(60)
LINES = jsonl(GOOD).splitlines()
ARRAY = json.dumps(GOOD[:2]).encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


def read_source(source: Path, **fields: object) -> list[SourceText | Rejected]:
    keys = FieldMap(**fields)
    return [item for shard in plan_source(str(source), keys).shards for _, item in read_items(shard, keys) if item]


def question(**row: object) -> bytes:
    return json.dumps({"question": "which river", **row}).encode()


# The user's own rows, and files of raw texts ------------------------------------------------------------------


CORPUS = [
    ("a.json", b'[{"id": 1, "text": "x"}, {"id": 2', r"a\.json, row 2: not valid JSON"),
    ("a.jsonl", b'{"id": 1, "text": "x \\ud83d"}\n', r"a\.jsonl:1: field 'text' holds half a surrogate"),
    ("a.json", b'[{"id": 1, "text": "x", "a": ["\\ud83d"]}]', r"a\.json, row 1: field 'a' holds"),
    ("a.csv", b"id,text\n1,x\n\n2\n", r"a\.csv:4: 1 columns, the header has 2"),
    ("a.csv", b'id,text\n1,"x\n', r"a\.csv:2: not valid CSV"),
    ("a.csv", b"id,text\n1,caf\xe9\n", r"a\.csv:2: not UTF-8"),
    ("a.csv", b"id,id\n1,2\n", r"a\.csv:1: two columns"),
    ("a.tsv", b"id\tpassage\n1\tx\n", r"a\.tsv:2 \(id 1\): field 'text' .* id, passage"),
    ("a.parquet", parquet(GOOD)[:-9], "a.parquet: no whole Parquet"),
    ("a.json.gz", gzip.compress(ARRAY)[:-12], r"a\.json\.gz: unreadable"),
    ("a.jsonl", b"\x7fELF\x02\x01\x01" + bytes(90), r"a\.jsonl is, .* binary"),
    ("a.jsonl", b'{"id": "1", "contents": "x"}\n', r"a\.jsonl:1 .*'text' is missing; .* contents"),
    ("a.jsonl", b'{"id": null, "text": "x"}\n', r"a\.jsonl:1: field 'id' is null or empty"),
    ("gone.jsonl", None, r"gone\.jsonl does not exist"),
]
EXAMPLES = [
    (question(answers=["No Answer Present."]), "field 'answers' is 'No Answer Present.'"),  # MS MARCO
    (question(answers={"text": [], "answer_start": []}), "field 'answers' must be a list of texts"),  # SQuAD
    (question(answers='["\\ud83d"]'), "field 'answers' must be a list of texts"),
    (question(context="A passage."), "'continuation' .* question, context"),
]
SOURCES = [
    ({"a.json": b'{"contents": "one"}\n'}, r"a\.json has no rows with 'text' .found: contents"),
    ({"README.md": b"a", "a.parquet": LFS}, r"a\.parquet is, .* Git LFS, .*git lfs pull"),
    ({"a.tsv": "id\ttext\n".encode("utf-16")}, r"a\.tsv is, .* UTF-16; expected JSON Lines"),
]


@pytest.mark.parametrize("case", CORPUS)
def test_a_corpus_that_cannot_be_read_is_refused_with_its_place(case: tuple, tmp_path: Path) -> None:
    name, content, says = case
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize(("content", "says"), EXAMPLES)
def test_examples_that_lack_what_the_lm_predicts_are_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"rows\.jsonl:1.*{says}"):
        read_examples(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("files", "says"), SOURCES)
def test_a_source_that_cannot_be_read_is_refused_with_the_files_name(files: dict, says: str, tmp_path: Path) -> None:
    write_files(tmp_path, files)
    with pytest.raises(UserError, match=says):
        read_source(tmp_path)


def test_a_line_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replug.data.sources.records, "MAX_LINE_BYTES", 100)
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "text": "short"}\n' + b'{"id": 2, "text": "' + b"x" * 10**6 + b'"}\n'))
    with pytest.raises(UserError, match=r"docs\.jsonl\.gz:2: the line is longer than 100 bytes"):
        list(read_documents(path))
    assert [(item.reason, item.line) for item in read_source(path) if isinstance(item, Rejected)] == [("too_long", 2)]


# One line of raw texts ----------------------------------------------------------------------------------------


def listed(out: Path) -> list[tuple[str, str, int | None]]:
    """Reason, file name and line of the cases in rejected.jsonl."""
    rows = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    return [(row["reason"], Path(row["file"]).name, row["line"]) for row in rows]


def prepare_all(tmp_path: Path, source: object, **keys: object) -> PreparedSet:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replug.data.prepare.reading, "MAX_REJECTED", 1.0)
        return prepare(tmp_path / "set", source, **keys)


def with_bad(*bad: bytes) -> bytes:
    """Good lines, with bad ones from line 11 on."""
    return b"\n".join([*LINES[:10], *bad, *LINES[10:]]) + b"\n"


def as_json(**fields: object) -> bytes:
    return json.dumps({"id": "bad", "text": "some words", **fields}).encode()


BAD_LINES = {
    "broken JSON": (b'{"text": "a" "b"}', "invalid_json"),
    "brackets thousands deep": (b"[" * 100_000, "invalid_json"),
    "a list": (b'["some", "words"]', "not_an_object"),
    "latin-1": ('{"id": "bad", "text": "caf\xe9"}'.encode("latin-1"), "not_utf8"),
    "half a surrogate pair": (b'{"id": "bad", "text": "words \\ud83d"}', "half_surrogate"),
    "no text": (b'{"id": "bad"}', "text_missing"),
    "empty text": (as_json(text=""), "text_empty"),
    "a number as text": (as_json(text=7), "text_not_a_string"),
    "a text that is too long": (as_json(text="word " * (4 << 20)), "too_long"),
    "a list as domain": (as_json(domain=["a"]), "not_a_string"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_rejected_with_its_place_and_the_others_are_taken(what, tmp_path):
    line, reason = BAD_LINES[what]
    (tmp_path / "raw.jsonl").write_bytes(with_bad(line))
    items = read_source(tmp_path / "raw.jsonl")
    [case] = [item for item in items if isinstance(item, Rejected)]
    assert (case.reason, Path(case.file).name, case.line, len(items)) == (reason, "raw.jsonl", 11, len(GOOD) + 1)


FINE = [
    b"\xef\xbb\xbf" + with_bad(),
    with_bad().replace(b"\n", b"\r\n"),
    with_bad(as_json(id=0), as_json(id=-5, text="other words"), as_json(id=7**99, text="words")),
    with_bad(as_json(id=None, domain=None)),
    with_bad(b'{"id": "fine", "text": "a \\ud83d\\ude42"}'),  # a whole surrogate pair
]


@pytest.mark.parametrize("content", FINE, ids=range(len(FINE)))
def test_what_looks_odd_but_is_fine_is_taken(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_bytes(content)
    assert not any(isinstance(item, Rejected) for item in read_source(tmp_path / "raw.jsonl"))


@pytest.mark.parametrize(("blank", "shard_bytes"), [(b"", 200), (b"\n" * 40, 1000)])
def test_lines_are_counted_from_the_beginning_of_the_file_in_whatever_source_shards_it_is_read(
    blank, shard_bytes, tmp_path, monkeypatch
):
    bad = [b"{", b"[1]", blank + b'{"id": "no text"}', b'"a"', b"\xff"]
    lines = [line for good, line in zip(LINES, [*bad] * 12, strict=True) for line in (good, blank + line, blank)]
    (tmp_path / "raw.jsonl").write_bytes(b"\n".join(lines) + blank)
    whole = prepare_all(tmp_path / "whole", tmp_path / "raw.jsonl")
    monkeypatch.setattr(replug.data.sources.shards, "SOURCE_SHARD_BYTES", shard_bytes)
    parts = prepare_all(tmp_path / "parts", tmp_path / "raw.jsonl")
    places = listed(whole.folder)
    assert len(places) == len(LINES)
    every = (tmp_path / "raw.jsonl").read_bytes().splitlines()
    assert all(every[line - 1] in {b.strip(b"\n") for b in bad} for _, _, line in places)
    assert contents(parts.folder) == contents(whole.folder)


def test_a_hundred_of_each_reason_are_listed_and_all_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(replug.data.sources.shards, "SOURCE_SHARD_BYTES", 3000)
    (tmp_path / "raw.jsonl").write_bytes(with_bad(*[b"{"] * 250, *[b"[]"] * 130))
    prepared = prepare_all(tmp_path, tmp_path / "raw.jsonl")
    assert prepared.manifest["rejected"] == {"invalid_json": 250, "not_an_object": 130}
    lines = [(reason, line) for reason, _, line in listed(prepared.folder)]
    assert lines == [("invalid_json", 11 + i) for i in range(100)] + [("not_an_object", 261 + i) for i in range(100)]


PACKED = gzip.compress(with_bad(), mtime=0)
BAD_FILES = {"b.jsonl.gz": PACKED[: len(PACKED) // 2], "b.parquet": b"PAR1" + with_bad()}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_named_and_the_others_are_taken(name: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "raw/a.jsonl", rows_of(60, seed=1))
    (tmp_path / "raw" / name).write_bytes(BAD_FILES[name])
    prepared = prepare_all(tmp_path, tmp_path / "raw")
    assert prepared.manifest["rejected"] == {"damaged_file": 1}
    ((reason, file, line),) = listed(prepared.folder)
    assert (reason, file) == ("damaged_file", name)
    assert line is None or 0 < line <= len(GOOD)
    assert 60 <= prepared.manifest["source"]["texts"] <= 120


TSV = [b"id\ttext\ttitle", *(f"{row['id']}\t{row['text']}\tT".encode() for row in GOOD)]


@pytest.mark.parametrize(("line", "reason"), [(b"7\twords", "wrong_columns"), (b'7\t"words\tT', "invalid_tsv")])
@pytest.mark.parametrize("shard_bytes", [500, 1 << 20])
def test_a_bad_line_of_a_table_is_counted_and_listed_with_its_place(line, reason, shard_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(replug.data.sources.shards, "SOURCE_SHARD_BYTES", shard_bytes)
    (tmp_path / "raw.tsv").write_bytes(b"\n".join([*TSV[:30], line, b"", *TSV[30:50], line, *TSV[50:]]))
    prepared = prepare_all(tmp_path, tmp_path / "raw.tsv")
    assert prepared.manifest["rejected"] == {reason: 2}
    assert listed(prepared.folder) == [(reason, "raw.tsv", 31), (reason, "raw.tsv", 53)]
    assert prepared.manifest["source"]["texts"] == len(GOOD)


BAD_TEXTS = [
    (b"\x89PNG\r\n\x1a\n\0\0", "not_utf8"),
    ("some words".encode("utf-16"), "not_utf8"),
    (b"word " * (4 << 20), "too_long"),
]


@pytest.mark.parametrize(("content", "reason"), BAD_TEXTS, ids=["picture", "UTF-16", "too long"])
def test_a_bad_file_in_a_tree_of_texts_is_named_and_the_others_are_taken(content, reason, tmp_path):
    write_files(tmp_path, {"deep/bad.txt": content, "deep/good.txt": b"some words"})
    bad, good = read_source(tmp_path)
    assert (bad.reason, Path(bad.file).name, bad.line, good.text) == (reason, "bad.txt", 0, "some words")


def test_a_source_with_too_many_bad_rows_stops_and_names_the_first_of_each_kind(tmp_path):
    (tmp_path / "raw.jsonl").write_bytes(with_bad(b"{", b"[]", b"{", b'{"a": 1}', *4 * [b'"x"']))
    with pytest.raises(UserError, match=r"8 of 68 rows .* more than a tenth") as error:
        prepare(tmp_path / "set", tmp_path / "raw.jsonl")
    for place in ("raw.jsonl:11: not valid JSON", "raw.jsonl:12: expected a JSON object", "raw.jsonl:14: field 'text'"):
        assert place in str(error.value)
    assert len(listed(tmp_path / "set")) == 8


@pytest.mark.parametrize("name", ["raw.jsonl", "raw.tsv", "raw.parquet"])
def test_an_empty_file_is_no_traceback(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match="some of each"):
        prepare_all(tmp_path, tmp_path / name)


def test_a_text_of_many_lines_that_is_too_long_is_one_rejection_and_the_next_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(replug.data.sources.texts, "MAX_CHARACTERS", 1000)
    for name, form in (("a.jsonl", lambda line: json.dumps({"text": line}) + "\n"), ("a.txt", str)):
        lines = [" = One\n", *["word " * 9 + "\n"] * 100, " = Two\n", "\n", "words\n"]
        (tmp_path / name).write_text("".join(map(form, lines)))
        [long, second] = read_source(tmp_path / name, new_text_at="^ = ")
        assert isinstance(long, Rejected) and (long.reason, long.line) == ("too_long", 1)
        assert isinstance(second, SourceText) and second.text == " = Two\n\nwords\n"
