"""What the user's own rows become."""

import bz2
import gzip
import json

import pytest

from replug.config.errors import UserError
from replug.data.records import Example
from replug.data.row_files import read_rows
from replug.data.rows import read_documents, read_examples


def test_every_field_of_a_text_is_kept_gold_ids_become_strings_and_a_row_names_a_text_without_id(tmp_path):
    row = {"id": 5, "context": "one", "continuation": " two", "domain": "d", "source": "s", "gold": ["a", 9]}
    (tmp_path / "a.jsonl").write_text(f'\ufeff{json.dumps(row)}\n{{"context": "three", "continuation": " four"}}\n')
    expected = [Example("5", "one", " two", "d", "s", ("a", "9")), Example("1", "three", " four", "all")]
    assert read_examples(tmp_path / "a.jsonl") == expected


def test_blank_lines_are_passed_over_and_still_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n   \n{"a": 2}')
    assert list(read_rows(path)) == [(f"{path}:2", {"a": 1}), (f"{path}:4", {"a": 2})]


PASSAGES = (
    "id\ttext\ttitle\n"
    '1\t"Aaron ( or ; ""Ahärôn"") is a prophet, high priest, and the brother of Moses"\tAaron\n'
    '2\tis described in ""Exodus"" 4:14 as the elder brother\t"Aaron ""the Levite"""\n'
)


def test_dprs_passages_of_wikipedia_are_a_corpus_as_they_are(tmp_path):
    """Lines of the form of psgs_w100.tsv, in which a field is quoted where it begins with a quote."""
    (tmp_path / "psgs.tsv").write_text(PASSAGES)
    with gzip.open(tmp_path / "psgs.tsv.gz", "wt") as file:
        file.write(PASSAGES)
    plain, packed = (list(read_documents(tmp_path / name)) for name in ("psgs.tsv", "psgs.tsv.gz"))
    assert plain == packed and [document.id for document in plain] == ["1", "2"]
    assert plain[0].text == 'Aaron\nAaron ( or ; "Ahärôn") is a prophet, high priest, and the brother of Moses'
    assert plain[1].text.startswith('Aaron "the Levite"\n')


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("id\ttext\ttitle\n1\tno title\n", ":2: 2 columns, the header has 3"),
        ('id\ttext\n1\t"open\n', ":2: not valid TSV"),
        ("id\tpassage\n1\tx\n", r":2 \(id 1\): field 'text' is missing; the fields here are id, passage"),
        ("id\ttext\n", "holds no documents"),
    ],
)
def test_a_table_that_is_none_is_named_with_its_line(tmp_path, rows, message):
    (tmp_path / "table.tsv").write_text(rows)
    with pytest.raises(UserError, match=message):
        list(read_documents(tmp_path / "table.tsv"))


def test_fields_that_are_not_read_are_named_once(tmp_path, caplog):
    caplog.set_level("INFO", "replug")
    (tmp_path / "docs.jsonl").write_text(
        '{"id": 1, "text": "one", "url": "u"}\n{"id": 2, "text": "two", "date": "d"}\n'
    )
    assert len(list(read_documents(tmp_path / "docs.jsonl"))) == 2
    (tmp_path / "texts.jsonl").write_text('{"context": "one", "continuation": " two", "golds": ["1"]}\n')
    read_examples(tmp_path / "texts.jsonl")
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "docs.jsonl: fields that are not read: url, date; read are id, text, and a row may have id, text," in said[0]
    assert "texts.jsonl: fields that are not read: golds; read are context, continuation, and a row may" in said[1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_questions_are_examples_and_a_query_is_not_the_context(tmp_path, caplog):
    path = tmp_path / "nq.jsonl"
    rows = [
        {"question": "who wrote  Faust?", "answers": ["Goethe", "J. W. Goethe"], "gold": [7], "url": "u"},
        {"context": "Question: which river?\nAnswer:", "continuation": " Rhine", "query": "which river?"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, own = read_examples(path)
    assert asked == Example(
        "0", "Question: who wrote Faust?\nAnswer:", " Goethe", "all", None, ("7",), "who wrote  Faust?"
    )
    assert (own.query, own.context, own.has_query) == ("which river?", rows[1]["context"], True)
    assert "fields that are not read: url; read are id" not in caplog.text and "not read: url; read are" in caplog.text
    path.write_text(json.dumps({"question": "who?", "answers": []}))
    with pytest.raises(UserError, match=r"nq.jsonl:1: field 'answers' must be a list of texts, at least one"):
        read_examples(path)


ROW = b'{"id": "a", "text": "The Rhine flows through Basel."}\n'
OF_OTHER_FORMS = {
    "FlashRAG": ("a.jsonl", b'{"id": "1", "contents": "x"}\n', "'text' is missing; the fields here are id, contents"),
    "Zip": ("a.jsonl", b"PK\x03\x04\xff", "a.jsonl is, by its first bytes, Zip"),
    "UTF-16": ("a.jsonl", ROW.decode().encode("utf-16"), "a.jsonl is, by its first bytes, UTF-16"),
    "null as id": ("a.jsonl", b'{"id": null, "text": "x"}\n', "a.jsonl:1: field 'id' is null"),
    "a key twice": ("a.jsonl", b'{"id": 1, "text": "x", "text": "y"}\n', "a.jsonl:1: .* two fields named 'text'"),
}


@pytest.mark.parametrize("form", OF_OTHER_FORMS)
def test_a_corpus_of_another_form_is_refused_with_what_it_is(form, tmp_path):
    name, content, says = OF_OTHER_FORMS[form]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        list(read_documents(tmp_path / name))


def test_a_corpus_may_be_packed_in_any_way_whatever_it_is_called(tmp_path):
    packed = {
        "a.jsonl.bz2": bz2.compress(ROW),
        "b.jsonl": gzip.compress(ROW),
        "c.tsv.bz2": bz2.compress(b"id\ttext\na\tx\n"),
    }
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
        assert [document.id for document in read_documents(tmp_path / name)] == ["a"]
