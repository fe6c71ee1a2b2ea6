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


PASSAGES = [{"title": "T", "text": "first"}, {"title": "T", "text": "second"}]
PARAGRAPHS = ("It began in 1844. It ended.", "A title. It began in 1989.")
WITHOUT = {"edited_question": "who", "answer": ["Bo"], "id": 1, "date_type": "start"}
ROWS = [  # a set, its row, and what the question has
    ("nq", NQ, {"id": "set.jsonl:1", "answers": ("Ada", "Ada L."), "evidence": (), "evidence_ids": ()}),
    ("nq", {**NQ, "gold": ["p1", "p2"]}, {"gold": ("p1", "p2"), "evidence_ids": ("p1",), "evidence": ()}),
    ("nq", {**NQ, "positive_ctxs": PASSAGES, "gold": ["p1"]}, {"evidence": ("T\nfirst",), "evidence_ids": ("p1",)}),
    ("nq", {"question": "d", "answers": ["x"], "gold_evidence": "told"}, {"answers": ("x",), "evidence": ("told",)}),
    ("hotpotqa", HOTPOT, {"id": "5a8b", "group": "comparison", "evidence": PARAGRAPHS}),
    ("fever", CLAIM, {"evidence_ids": ("Nikolaj", "Fox"), "gold": ("Nikolaj", "Fox"), "query": CLAIM["claim"]}),
    ("fever", NOTHING, {"evidence_ids": (), "answers": ("NOT ENOUGH INFO",)}),
    ("strategyqa", STRATEGY, {"answers": ("No",), "labels": ("Yes", "No"), "evidence": ("Fish swim.", "Birds fly.")}),
    ("situatedqa", DATED, {"query": "who leads as of January 27, 2021", "answers": ("Bo",), "origin": "-79"}),
    ("situatedqa", PLACED, {"query": "who leads in Peru", "group": "all"}),
    # A fact is new where it began after the paper's LM was trained.
    ("situatedqa", {**WITHOUT, "date": "December 4, 2020"}, {"group": NEW}),
    ("situatedqa", {**WITHOUT, "date": "2021"}, {"group": NEW}),
    ("situatedqa", {**WITHOUT, "date": "2021", "date_type": "sampled"}, {"group": OLD}),
    ("situatedqa", {**WITHOUT, "date": "November 2020"}, {"group": OLD}),
    ("situatedqa", {**WITHOUT, "date": "2020"}, {"group": OLD}),
]


@pytest.mark.parametrize(("dataset", "row", "expected"), ROWS)
def test_a_row_becomes_a_question_as_its_set_has_it(dataset, row, expected, tmp_path):
    [question] = read(dataset, tmp_path, row)
    found = {name: getattr(question if hasattr(question, name) else question.example, name) for name in expected}
    assert found == expected


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
