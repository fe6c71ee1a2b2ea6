"""Rows in the formats that users have them in: each is read, or named with its place and what was expected."""

import gzip
import json
import shutil

import pytest

from replug.config.errors import UserError
from replug.data.records import Example
from replug.data.rows import (
    DEV,
    TRAIN,
    count_documents,
    count_rows,
    example_rows,
    read_documents,
    read_examples,
    read_qrels,
    read_rows,
    read_run,
    rows_sha256,
)
from replug.data.sources import formats
from replug.data.words import content_hash
from replug.evals.questions import read_questions
from tests.support.preparing import jsonl, parquet, write_files, write_jsonl

ROWS = [{"id": "a", "text": 'The Rhine, "Rhein",\nflows'}, {"id": "b", "text": "through Basel; ünd"}]
LINES = jsonl(ROWS)
CSV = 'id,text\na,"The Rhine, ""Rhein"",\nflows"\nb,through Basel; ünd\n'.encode()


FORMATS = {
    "JSON Lines": {"rows.jsonl": LINES},
    "a JSON array": {"rows.json": json.dumps(ROWS, indent=1).encode()},
    "a JSON array called JSONL": {"rows.jsonl": b"\xef\xbb\xbf \n" + json.dumps(ROWS, ensure_ascii=False).encode()},
    "CSV": {"rows.csv": CSV},
    "CSV with semicolons": {"rows.csv": 'id;text\na;"The Rhine, ""Rhein"",\nflows"\nb;"through Basel; ünd"'.encode()},
    "Parquet": {"rows.parquet": parquet(ROWS)},
    "gzip without its suffix": {"rows.jsonl": gzip.compress(LINES)},
    "a folder": {"x/1.jsonl": LINES[: LINES.index(b"\n") + 1], "x/2.parquet": parquet(ROWS[1:]), "x/README.md": b"#"},
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_told_by_its_first_bytes_and_gives_the_same_rows(form, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "READ_CHARACTERS", 7)
    source = write_files(tmp_path, FORMATS[form]) / next(iter(FORMATS[form])).partition("/")[0]
    assert [row for _, row in read_rows(source)] == ROWS
    assert count_rows(source) == 2


def test_ms_marcos_tables_have_no_header_and_quotes_that_mean_nothing(tmp_path):
    (tmp_path / "collection.tsv").write_text('0\tThe "Rhine flows\n1\tx\n')
    found = [(doc.id, doc.text) for doc in read_documents(tmp_path / "collection.tsv")]
    assert found == [("0", 'The "Rhine flows'), ("1", "x")]
    (tmp_path / "docs.tsv").write_text("D12\thttp://a\tRhine\tIt flows\n")
    assert next(read_documents(tmp_path / "docs.tsv")).text == "Rhine\nIt flows"


def test_fields_have_other_names_by_one_key_also_within_fields(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"meta": {"pid": 7}, "contents": "x", "text": "html"}\n')
    (tmp_path / "texts.jsonl").write_text('{"qid": 1, "prompt": "one", "completion": " two"}\n')
    names = {"meta.pid": "id", "contents": "text", "qid": "id", "prompt": "context", "completion": "continuation"}
    [document] = read_documents(tmp_path / "docs.jsonl", names)
    [example] = read_examples(tmp_path / "texts.jsonl", names)
    assert (document.id, document.text) == ("7", "x")
    assert (example.id, example.context, example.continuation) == ("1", "one", " two")
    (tmp_path / "flat.csv").write_text("meta.pid,contents\n7,x\n")  # as pandas flattens them
    assert [document.id for document in read_documents(tmp_path / "flat.csv", names)] == ["7"]
    with pytest.raises(UserError, match=r"'id' is missing; .* give data\.fields\.NAME=id, or rename one"):
        list(read_documents(tmp_path / "docs.jsonl"))


# Known data sets -----------------------------------------------------------------------------------------------

BEIR = {
    "beir/corpus.jsonl": b'{"_id": "d1", "title": "Rhine", "text": "It flows."}\n{"_id": "d2", "text": "x"}\n',
    "beir/queries.jsonl": b'{"_id": "q1", "text": "what flows?"}\n{"_id": "q2", "text": "who?"}\n',
    "beir/qrels/train.tsv": b"query-id\tcorpus-id\tscore\nq2\td2\t1\n",
    "beir/qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\n",
}


def test_a_beir_folder_is_documents_and_the_queries_of_a_split(tmp_path):
    folder = write_files(tmp_path, BEIR) / "beir"
    assert [(doc.id, doc.text) for doc in read_documents(folder)] == [("d1", "Rhine\nIt flows."), ("d2", "x")]
    [(_, row)] = example_rows(folder, split=TRAIN)
    assert (row["id"], row["query"], row["continuation"], row["gold"]) == ("q2", "who?", " who?", ["d2"])
    assert (count_rows(folder), count_rows(folder, TRAIN)) == (2, 1)
    assert rows_sha256(folder) != rows_sha256(folder, TRAIN)
    with pytest.raises(UserError, match=r"qrels/dev.tsv does not exist; .*beir has the splits test, train"):
        list(example_rows(folder, split=DEV))


POSITIVE = {"title": "Rhine", "text": "It flows.", "passage_id": "7", "score": 1}
NEGATIVE = [{"title": "", "text": "x", "psg_id": 9}, {"title": "", "text": "It flows.", "psg_id": 7}]
QUESTION = {"question": "what flows?", "answers": ["the Rhine"]}
DPR = [QUESTION | {"positive_ctxs": [POSITIVE], "negative_ctxs": [], "hard_negative_ctxs": NEGATIVE}]
HITS = [QUESTION | {"ctxs": [{"id": "7", "text": "It flows."}, {"id": "9", "text": "x"}]}]
PAIRS = [{"query": "what flows?", "pos": ["It flows."], "neg": ["x", "It flows."], "pos_scores": [1.0]}]
OF_FLOWS = content_hash("It flows.").hex()
SETS = {
    "DPR": (DPR, ["7", "9"], ["7"]),
    "hits of any retriever": (HITS, ["7", "9"], []),
    "FlagEmbedding": (PAIRS, [OF_FLOWS, content_hash("x").hex()], [OF_FLOWS]),
}


@pytest.mark.parametrize("name", SETS)
def test_passages_of_rows_are_documents_and_candidates_by_the_same_ids(name, tmp_path):
    rows, ids, gold = SETS[name]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert [document.id for document in read_documents(tmp_path / "rows.json")] == ids
    assert (count_documents(tmp_path / "rows.json"), count_rows(tmp_path / "rows.json")) == (2, 1)
    [(_, row)] = example_rows(tmp_path / "rows.json")
    assert (row["candidates"], row["gold"]) == (ids, gold)
    if "answers" in rows[0]:
        assert (row["question"], row["answers"]) == ("what flows?", ["the Rhine"])
    else:  # the LM is to predict the query
        assert (row["query"], row["context"], row["continuation"]) == ("what flows?", "Question:", " what flows?")


def test_lists_in_cells_are_read_as_json_and_others_are_refused(tmp_path):
    cells = {r'''"[""a\/b"", ""\ud83d\ude00""]"''': ["a/b", "\U0001f600"], "['x' 'y']": "['x' 'y']"}
    (tmp_path / "a.csv").write_text("question,answers\n" + "".join(f"q,{cell}\n" for cell in cells))
    assert [row["answers"] for _, row in read_rows(tmp_path / "a.csv")] == list(cells.values())
    with pytest.raises(UserError, match=r"a\.csv:3: field 'answers' must be a list of texts"):
        read_examples(tmp_path / "a.csv")


def test_passages_that_share_an_id_with_others_are_refused(tmp_path):
    rows = [{"question": "a?", "answers": ["x"], "ctxs": [{"id": 0, "text": text}]} for text in ("one", " one ", "two")]
    (tmp_path / "rows.json").write_text(json.dumps(rows[:2]))
    assert [document.text for document in read_documents(tmp_path / "rows.json")] == ["one"]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"row 3: passage '0' has other words than before; expected an id that names"):
        list(read_documents(tmp_path / "rows.json"))


def test_a_row_with_a_context_and_no_answer_is_not_taken_for_a_query(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "who?", "context": "A passage.", "answer": "x"}])
    assert read_examples(path)[0].continuation == " x"


@pytest.mark.parametrize("table", ["id|text\n1|The Rhine.", "id,text,,\n1,The Rhine.,,", "id, text\n1,The Rhine."])
def test_tables_are_read_as_spreadsheets_write_them(table, tmp_path):
    (tmp_path / "a.csv").write_text(f"{table}\n", newline="")
    assert [row for _, row in read_rows(tmp_path / "a.csv")] == [{"id": "1", "text": "The Rhine."}]


# Judgements and runs ----------------------------------------------------------------------------------------------


def test_judgements_and_runs_are_read_in_every_form(tmp_path):
    grades = {"q 1": {"d1": 2, "d2": 0}}
    (tmp_path / "beir.tsv").write_text("query-id\tcorpus-id\tscore\nq 1\td1\t2\nq 1\td2\t0\n")
    (tmp_path / "trec.tsv").write_text("q 1\t0\td1\t2\nq 1\t0\td2\t0\n")
    assert read_qrels(tmp_path / "beir.tsv") == read_qrels(tmp_path / "trec.tsv") == grades
    (tmp_path / "no_header.tsv").write_text("q 1\td1\t2.0\nq 1\td2\t0\n")
    assert read_qrels(tmp_path / "no_header.tsv") == grades
    (tmp_path / "run.trec").write_text("q1 Q0 a 2 2 bm25\nq1 Q0 b 1 3 bm25\nq1 Q0 c 3 1 bm25\n")
    (tmp_path / "marco.tsv").write_text("q1\ta\t2\nq1\tb\t1\nq1\tc\t3\n")
    assert read_run(tmp_path / "run.trec") == read_run(tmp_path / "marco.tsv") == {"q1": ["b", "a", "c"]}
    shutil.copy(tmp_path / "beir.tsv", tmp_path / "bad.tsv")
    with (tmp_path / "bad.tsv").open("a") as file:
        file.write("q 1\td3\tyes\n")
    with pytest.raises(UserError, match=r"bad\.tsv:4: 'yes' is not a grade"):
        read_qrels(tmp_path / "bad.tsv")


# What rows become -----------------------------------------------------------------------------------------------------


PASSAGES = (
    "id\ttext\ttitle\n"
    '1\t"Aaron ( or ; ""Ahärôn"") is a prophet, high priest, and the brother of Moses"\tAaron\n'
    '2\tis described in ""Exodus"" 4:14 as the elder brother\t"Aaron ""the Levite"""\n'
)


def test_dprs_passages_of_wikipedia_are_a_corpus_as_they_are(tmp_path):
    """Lines of the form of psgs_w100.tsv, in which a field is quoted where it begins with a quote."""
    (tmp_path / "psgs.tsv").write_text(PASSAGES)
    plain = list(read_documents(tmp_path / "psgs.tsv"))
    assert [document.id for document in plain] == ["1", "2"]
    assert plain[0].text == 'Aaron\nAaron ( or ; "Ahärôn") is a prophet, high priest, and the brother of Moses'
    assert plain[1].text.startswith('Aaron "the Levite"\n')


def test_fields_that_are_not_read_are_named_once(tmp_path, caplog):
    caplog.set_level("INFO", "replug")
    documents = [{"id": 1, "text": "one", "url": "u"}, {"id": 2, "text": "two", "date": "d"}]
    assert len(list(read_documents(write_jsonl(tmp_path / "docs.jsonl", documents)))) == 2
    read_examples(write_jsonl(tmp_path / "texts.jsonl", [{"context": "one", "continuation": " two", "golds": ["1"]}]))
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "docs.jsonl: fields that are not read: url, date; read are id, text, and a row may have id, text," in said[0]
    assert "texts.jsonl: fields that are not read: golds; read are context, continuation, and a row may" in said[1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_questions_are_examples_and_a_query_is_not_the_context(tmp_path, caplog):
    rows = [
        {"question": "who wrote  Faust?", "answers": ["Goethe", "J. W. Goethe"], "gold": [7], "url": "u"},
        {"context": "Question: which river?\nAnswer:", "continuation": " Rhine", "query": "which river?"},
    ]
    asked, own = read_examples(write_jsonl(tmp_path / "nq.jsonl", rows))
    prompt = "Question: who wrote Faust?\nAnswer:"
    assert asked == Example("0", prompt, " Goethe", "all", None, ("7",), "who wrote  Faust?")
    assert (own.query, own.context, own.has_query) == ("which river?", rows[1]["context"], True)
    assert "fields that are not read: url; read are id" not in caplog.text and "not read: url; read are" in caplog.text


# As published: NQ-open, FlashRAG, PopQA, TriviaQA, SQuAD, HotpotQA, RAGAS, and people's own.
ANSWERED = [
    {"answer": ["Rhine", "the Rhine"]},
    {"golden_answers": ["Rhine"]},
    {"possible_answers": '["Rhine", "Rhein"]'},
    {"answer": {"value": "Rhine", "aliases": ["Rhine", "The Rhine"]}},
    {"answers": {"text": ["Rhine", "Rhine"], "answer_start": [3, 9]}},
    {"ground_truth": "Rhine"},
    {"answers": "Rhine"},
]


@pytest.mark.parametrize("answers", ANSWERED)
@pytest.mark.parametrize("name", ["question", "query"])
def test_the_continuation_of_a_question_is_its_first_answer_whatever_the_sets_name_for_it(answers, name, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{name: "which river", **answers}])
    [example] = read_examples(path)
    assert (example.query, example.context) == ("which river", "Question: which river\nAnswer:")
    assert example.continuation == " Rhine"
    [question] = read_questions(path)
    assert question.answers[0] == "Rhine"


def test_a_title_alone_is_a_text_and_few_documents_may_be_empty(tmp_path, caplog):
    rows = [{"_id": str(i), "title": "", "text": "words"} for i in range(2)]
    rows += [{"_id": "9", "title": "Detection of rhinovirus", "text": ""}, {"_id": "7915", "title": "", "text": " "}]
    path = write_jsonl(tmp_path / "corpus.jsonl", rows)
    assert [document.text for document in read_documents(path)] == ["words", "words", "Detection of rhinovirus"]
    assert "1 of 4 documents have neither text nor title and are left out, first" in caplog.text
    assert "corpus.jsonl:4 (id 7915)" in caplog.text
