"""Where raw texts come from, and what they are called."""

import gzip
import json

import datasets

from replug.data.hashing import content_hash
from replug.data.sources.built_in_texts import MIN_CHARACTERS, PACKAGE_TEXTS
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.sources.shards import plan_source_shards, read_source_shard

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
