"""What the user's own rows become."""

import bz2
import gzip
import json

import pytest

from replug.config.errors import UserError
from replug.data.records import Example
from replug.data.row_files import read_rows
from replug.data.rows import read_documents, read_examples
from replug.evals.questions import read_questions


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


# As published: NQ-open, FlashRAG, PopQA, TriviaQA, SQuAD, HotpotQA, RAGAS, and people's own.
ANSWERED = [
    {"answer": ["Rhine", "the Rhine"]},
    {"golden_answers": ["Rhine"]},
    {"possible_answers": '["Rhine", "Rhein"]'},
    {"answer": {"value": "Rhine", "aliases": ["Rhine", "The Rhine"]}},
    {"answers": {"text": ["Rhine", "Rhine"], "answer_start": [3, 9]}},
    {"answer": "Rhine"},
    {"ground_truth": "Rhine"},
    {"answers": "Rhine"},
]


@pytest.mark.parametrize("answers", ANSWERED)
@pytest.mark.parametrize("name", ["question", "query"])
def test_the_continuation_of_a_question_is_its_first_answer_whatever_the_sets_name_for_it(answers, name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({name: "which river", **answers}))
    [example] = read_examples(path)
    assert (example.query, example.context) == ("which river", "Question: which river\nAnswer:")
    assert example.continuation == " Rhine"
    [question] = read_questions(path)
    assert question.answers[0] == "Rhine"


def test_a_title_alone_is_a_text_and_few_documents_may_be_empty(tmp_path, caplog):
    rows = [{"_id": str(i), "title": "", "text": "words"} for i in range(2)]
    rows += [{"_id": "9", "title": "Detection of rhinovirus", "text": ""}, {"_id": "7915", "title": "", "text": " "}]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [document.text for document in read_documents(path)] == ["words", "words", "Detection of rhinovirus"]
    assert "1 documents have neither text nor title and are left out, first" in caplog.text
    assert "corpus.jsonl:4 (id 7915)" in caplog.text
    path.write_text("".join(json.dumps(row | {"text": ""}) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"corpus.jsonl:1 \(id 0\): field 'text' is empty, as in 3 of 4 documents"):
        list(read_documents(path))


ROW = b'{"id": "a", "text": "The Rhine flows through Basel."}\n'


def test_a_corpus_may_be_packed_in_any_way_whatever_it_is_called(tmp_path):
    packed = {
        "a.jsonl.bz2": bz2.compress(ROW),
        "b.jsonl": gzip.compress(ROW),
        "c.tsv.bz2": bz2.compress(b"id\ttext\na\tx\n"),
    }
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
        assert [document.id for document in read_documents(tmp_path / name)] == ["a"]
