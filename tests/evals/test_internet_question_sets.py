"""The readers of the public sets: each row as it is published, and what is refused by name."""

import gzip
import json
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.evals.internet_sets import QUESTION_SETS
from tests.support.shared_data import shared

NQ = {"question": "who wrote it", "answer": ["Ada", "Ada L."]}
HOTPOT = {
    "_id": "5a8b",
    "question": "Which came first?",
    "answer": "Arthur's Magazine",
    "type": "comparison",
    "supporting_facts": [["Arthur's Magazine", 0], ["First for Women", 1], ["First for Women", 9]],
    "context": [
        ["Arthur's Magazine", ["It began in 1844.", " It ended."]],
        ["First for Women", ["A title.", " It began in 1989."]],
        ["Other", ["Nothing."]],
    ],
}
CLAIM = {
    "id": 75397,
    "label": "SUPPORTS",
    "claim": "Nikolaj worked with Fox.",
    "evidence": [[[92206, 104971, "Nikolaj", 7], [92206, 104971, "Fox", 0]], [[92207, 1, "Nikolaj", 7]]],
}
NOTHING = {"id": 7, "label": "NOT ENOUGH INFO", "claim": "Nobody knows.", "evidence": [[[108548, None, None, None]]]}
STRATEGY = {"qid": "q1", "question": "Do fish fly?", "answer": False, "facts": ["Fish swim. ", "Birds fly."]}
DATED = {
    "question": "who leads",
    "id": -79,
    "edited_question": "who leads as of January 27, 2021",
    "date": "January 27, 2021",
    "date_type": "start",
    "answer": ["Bo", "Bo"],
}
PLACED = {
    "question": "who leads",
    "id": 5,
    "edited_question": "who leads in Peru",
    "location": "Peru",
    "answer": ["Cy"],
}


def read(dataset: str, folder: Path, *rows: dict):
    """As the set is published: a JSON array, or JSON Lines."""
    if dataset in ("hotpotqa", "strategyqa"):
        path = folder / "set.json"
        path.write_text(json.dumps(rows))
    else:
        path = folder / "set.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return QUESTION_SETS[dataset].read(path)


def test_nq_has_answers_under_either_name_and_evidence_of_three_kinds(tmp_path):
    passages = [{"title": "T", "text": "first"}, {"title": "T", "text": "second"}]
    rows = [
        NQ,
        {"question": "b", "answers": ["x"], "gold": ["p1", "p2"]},
        {"question": "c", "answers": ["x"], "positive_ctxs": passages, "gold": ["p1"]},
        {"question": "d", "answers": ["x"], "gold_evidence": "told"},
    ]
    questions = read("nq", tmp_path, *rows)
    assert questions[0].answers == ("Ada", "Ada L.") and questions[0].example.id == "set.jsonl:1"
    assert [question.evidence for question in questions] == [(), (), ("T\nfirst",), ("told",)]
    assert [question.evidence_ids for question in questions] == [(), ("p1",), ("p1",), ()]
    assert questions[1].example.gold == ("p1", "p2")


def test_hotpotqas_evidence_are_its_supporting_sentences(tmp_path):
    [question] = read("hotpotqa", tmp_path, HOTPOT)
    assert question.evidence == ("It began in 1844.", "It began in 1989."), "there is no tenth sentence"
    assert (question.example.id, question.example.group) == ("5a8b", "comparison")


def test_fever_names_the_pages_of_its_first_set_of_evidence_and_none_where_nothing_is_known(tmp_path):
    told, untold = read("fever", tmp_path, CLAIM, NOTHING)
    assert told.evidence_ids == ("Nikolaj", "Fox") and told.example.gold == ("Nikolaj", "Fox")
    assert untold.evidence_ids == () and untold.answers == ("NOT ENOUGH INFO",)
    assert len(told.labels) == 3 and told.example.query == CLAIM["claim"]


def test_strategyqa_is_yes_or_no_with_its_facts(tmp_path):
    [question] = read("strategyqa", tmp_path, STRATEGY)
    assert question.answers == ("No",) and question.labels == ("Yes", "No")
    assert question.evidence == ("Fish swim.", "Birds fly.")


def test_situatedqa_is_asked_with_its_date_or_place_and_variants_share_an_origin(tmp_path):
    rows = [DATED, {**DATED, "date": "2020", "edited_question": "who leads as of 2020"}, PLACED]
    after, before, placed = read("situatedqa", tmp_path, *rows)
    assert after.example.query == "who leads as of January 27, 2021"
    assert [question.example.group for question in (after, before, placed)] == ["after 2020", "up to 2020", "all"]
    assert after.origin == before.origin == "-79" and after.example.id != before.example.id
    assert after.answers == ("Bo",), "the published set names one answer twice"


@pytest.mark.parametrize(
    ("dataset", "row", "message"),
    [
        ("nq", {"question": "a"}, "set.jsonl:1: expected the field 'answer' or 'answers', found neither"),
        ("nq", {**NQ, "positive_ctxs": [{"text": "x"}]}, "the first of positive_ctxs: field 'title' must be a text"),
        ("hotpotqa", {**HOTPOT, "context": {"title": []}}, "field 'context' must be a list of pairs"),
        ("hotpotqa", {**HOTPOT, "supporting_facts": [["No", 0]]}, r"names \['No', 0\], which 'context' lacks"),
        ("fever", {**CLAIM, "label": "TRUE"}, "label 'TRUE' is unknown; expected one of SUPPORTS"),
        ("fever", {**CLAIM, "evidence": [["x"]]}, "evidence 'x' is not"),
        ("strategyqa", {**STRATEGY, "answer": "yes"}, "field 'answer' must be true or false, found 'yes'"),
        ("situatedqa", {**DATED, "date": "last week"}, "date 'last week' does not end with a year"),
        ("situatedqa", {"question": "a", "answer": ["x"], "id": 1}, "field 'location' must be a text"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_place_and_field(dataset, row, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read(dataset, tmp_path, row)


def test_the_real_sets_beside_the_repository_are_read():
    strategy = QUESTION_SETS["strategyqa"].read(shared("strategyqa.jsonl.gz"))
    assert len(strategy) == 140 and all(question.evidence for question in strategy)
    nq = QUESTION_SETS["nq"].read(shared("nq_open_gold.jsonl.gz"))
    with gzip.open(shared("mini_wikipedia.jsonl.gz"), "rt") as file:
        ids = {json.loads(line)["id"] for line in file}
    assert len(nq) == 1700 and all(question.evidence_ids[0] in ids for question in nq)
