"""The public sets: how their rows are read, and which questions are shown, measured and fitted on."""

import json
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import QuestionsConfig
from replug.evals.internet_sets import (
    NEW,
    OLD,
    InternetQuestion,
    gold_evidence,
    is_validation,
    plan_questions,
    read_set,
)
from replug.evals.loop import Item
from tests.support.preparing import write_jsonl

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
        write_jsonl(path, list(rows))
    return read_set(dataset, path)


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


def test_hotpotqas_evidence_are_the_paragraphs_of_its_supporting_facts(tmp_path):
    [question] = read("hotpotqa", tmp_path, HOTPOT)
    paragraphs = dict(HOTPOT["context"])
    shown = (paragraphs["Arthur's Magazine"], paragraphs["First for Women"])
    assert question.evidence == tuple(" ".join(map(str.strip, sentences)) for sentences in shown)
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
    assert [question.example.group for question in (after, before, placed)] == [NEW, OLD, "all"]
    assert after.origin == before.origin == "-79" and after.example.id != before.example.id
    assert after.answers == ("Bo",), "the published set names one answer twice"


@pytest.mark.parametrize(
    ("date", "date_type", "group"),
    [
        ("December 4, 2020", "start", "new"),
        ("2021", "start", "new"),
        ("2021", "sampled", "old"),
        ("November 2020", "start", "old"),
        ("2020", "start", "old"),
    ],
)
def test_a_fact_is_new_where_it_began_after_the_papers_lm_was_trained(date, date_type, group, tmp_path):
    [question] = read("situatedqa", tmp_path, {**DATED, "date": date, "date_type": date_type})
    assert question.example.group == {"new": NEW, "old": OLD}[group]


def test_the_validation_part_is_chosen_by_the_questions_words_not_by_the_file(tmp_path):
    rows = [{"question": f"what is {n}?", "answer": [str(n)]} for n in range(100)]
    copies = [{**row, "id": f"other-{n}"} for n, row in enumerate(reversed(rows))]
    chosen = []
    for some in (rows, copies):
        chosen.append({one.example.query for one in read("nq", tmp_path, *some) if is_validation(one)})
    assert chosen[0] == chosen[1] and len(chosen[0]) > 0


# Shots, the validation part and gold evidence ------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path) -> Path:
    """Forty questions, of which every second tells its evidence."""
    rows = [{"id": f"q{n}", "question": f"what is {n}?", "answers": [str(n)]} for n in range(40)]
    write_jsonl(tmp_path / "nq.jsonl", [{**row, "gold_evidence": "e"} if n % 2 else row for n, row in enumerate(rows)])
    return tmp_path / "nq.jsonl"


def ids(questions) -> list[str]:
    return [question.example.id for question in questions]


def test_shots_have_evidence_and_are_never_measured(questions):
    plan = plan_questions(QuestionsConfig(path=str(questions), dataset="nq"), 0)
    assert len(plan[1]) == 15 and all(shot.evidence for shot in plan[1])
    assert len(plan[0]) == 25 and not set(ids(plan[1])) & set(ids(plan[0]))
    assert plan == plan_questions(QuestionsConfig(path=str(questions), dataset="nq"), 0)
    assert ids(plan[1]) != ids(plan_questions(QuestionsConfig(path=str(questions), dataset="nq"), 1)[1])


def test_situatedqas_shots_are_natural_questions_and_variants_are_on_one_side(questions, tmp_path):
    dated = [(n // 4, str(2018 + n % 4)) for n in range(400)]
    rows = [{"id": n, "edited_question": f"who leads {n} as of {y}", "date": y, "answer": ["x"]} for n, y in dated]
    path = tmp_path / "temp.jsonl"
    write_jsonl(path, rows)
    plan = plan_questions(QuestionsConfig(path=str(path), dataset="situatedqa", demonstrations=str(questions)), 0)
    assert len(plan[0]) == 400 and plan[1][0].example.query.startswith("what is")
    sides = {question.origin: set() for question in plan[0]}
    for question in plan[0]:
        sides[question.origin].add(is_validation(question))
    assert all(len(side) == 1 for side in sides.values())
    assert 2 <= sum(map(any, sides.values())) <= 20, "a tenth of a hundred"
    with pytest.raises(UserError, match="0 of 400 questions"):
        plan_questions(QuestionsConfig(path=str(path), dataset="situatedqa"), 0)


def question(name: str, **of) -> InternetQuestion:
    return InternetQuestion(Item(name, f"{name}?", "all"), ("x",), **of)


class Documents:
    """A corpus of any document but one."""

    def rows_of(self, ids):
        return {name: name for name in ids if name != "gone"}

    def texts(self, rows):
        return [f"text of {name}" for name in rows]


def test_evidence_is_the_sets_own_text_or_documents_of_the_corpus():
    given = [question("a", evidence=("one.", "two.")), question("b", evidence_ids=("p", "q"))]
    assert gold_evidence(given, Documents(), "gold") == {"a": "one. two.", "b": "text of p text of q"}


def test_what_nothing_answers_has_the_evidence_of_another_question_whatever_the_order():
    labels = ("SUPPORTS", "NOT ENOUGH INFO")
    given = [question(f"s{n}", labels=labels, evidence=(f"e{n}",)) for n in range(5)]
    unknown = question("unknown", labels=labels)
    found = gold_evidence([*given, unknown], None, "gold")
    assert found["unknown"] in {f"e{n}" for n in range(5)}
    assert found == gold_evidence([unknown, *reversed(given)], None, "gold")
