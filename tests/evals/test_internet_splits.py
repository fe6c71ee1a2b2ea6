"""Which questions are shown, measured and fitted on, and which evidence they have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import QuestionsConfig
from replug.evals.internet_preparing import gold_evidence, is_validation, plan_questions
from replug.evals.internet_sets import QUESTION_SETS, InternetQuestion
from replug.evals.loop import Item

NQ, SITUATED = QUESTION_SETS["nq"], QUESTION_SETS["situatedqa"]


@pytest.fixture
def questions(tmp_path) -> Path:
    """Forty questions, of which every second tells its evidence."""
    rows = [
        {
            "id": f"q{n}",
            "question": f"what is {n}?",
            "answers": [str(n)],
            **({"gold_evidence": f"e{n}"} if n % 2 else {}),
        }
        for n in range(40)
    ]
    path = tmp_path / "nq.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(questions) -> list[str]:
    return [question.example.id for question in questions]


def test_shots_have_evidence_and_are_never_measured(questions):
    plan = plan_questions(QuestionsConfig(path=str(questions)), NQ, 0)
    assert len(plan[1]) == 15 and all(shot.evidence for shot in plan[1])
    assert len(plan[0]) == 25 and not set(ids(plan[1])) & set(ids(plan[0]))
    assert plan == plan_questions(QuestionsConfig(path=str(questions)), NQ, 0)
    assert ids(plan[1]) != ids(plan_questions(QuestionsConfig(path=str(questions)), NQ, 1)[1])


def test_too_few_with_evidence_are_refused_with_the_keys_that_mend_it(questions):
    with pytest.raises(UserError, match=r"21 shots .* 20 of 40 .*questions.demonstrations.*questions.shots"):
        plan_questions(QuestionsConfig(path=str(questions), shots=21), NQ, 0)


def test_a_seed_of_demonstrations_draws_other_shots_and_leaves_what_is_measured(questions):
    keys = QuestionsConfig(path=str(questions), demonstrations=str(questions), shots=5, max_questions=20)
    by_seed = [plan_questions(replace(keys, demonstration_seed=seed), NQ, 0) for seed in (None, 0, 1)]
    assert by_seed[0] == by_seed[1] and by_seed[0][0] == by_seed[2][0]
    assert set(ids(by_seed[0][1])) != set(ids(by_seed[2][1]))


def test_situatedqas_shots_are_natural_questions_and_variants_are_on_one_side(questions, tmp_path):
    rows = [
        {
            "id": n // 4,
            "edited_question": f"who leads {n // 4} as of {2018 + n % 4}",
            "date": str(2018 + n % 4),
            "answer": ["x"],
        }
        for n in range(400)
    ]
    path = tmp_path / "temp.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = plan_questions(QuestionsConfig(path=str(path), demonstrations=str(questions)), SITUATED, 0)
    assert len(plan[0]) == 400 and plan[1][0].example.query.startswith("what is")
    sides = {question.origin: set() for question in plan[0]}
    for question in plan[0]:
        sides[question.origin].add(is_validation(question))
    assert all(len(side) == 1 for side in sides.values())
    assert 2 <= sum(map(any, sides.values())) <= 20, "a tenth of a hundred"
    with pytest.raises(UserError, match="0 of 400 questions"):
        plan_questions(QuestionsConfig(path=str(path)), SITUATED, 0)


def question(name: str, **of) -> InternetQuestion:
    return InternetQuestion(Item(name, f"{name}?", "all"), ("x",), **of)


def texts(ids):
    return {name: f"text of {name}" for name in ids if name != "gone"}


def test_evidence_is_the_sets_own_text_or_documents_of_the_corpus():
    given = [question("a", evidence=("one.", "two.")), question("b", evidence_ids=("p", "q"))]
    assert gold_evidence(given, texts, "gold") == {"a": "one. two.", "b": "text of p text of q"}


def test_what_nothing_answers_has_the_evidence_of_another_question_whatever_the_order():
    labels = ("SUPPORTS", "NOT ENOUGH INFO")
    given = [question(f"s{n}", labels=labels, evidence=(f"e{n}",)) for n in range(5)]
    unknown = question("unknown", labels=labels)
    found = gold_evidence([*given, unknown], None, "gold")
    assert found["unknown"] in {f"e{n}" for n in range(5)}
    assert found == gold_evidence([unknown, *reversed(given)], None, "gold")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question("a"), "question a has no gold evidence, which methods: gold needs"),
        (question("a", labels=("Yes", "No")), "question a has no gold evidence"),
        (question("a", evidence_ids=("gone",)), "names the document gone as its gold evidence, which data.corpus"),
    ],
)
def test_evidence_that_is_not_there_is_refused_by_name(asked, message):
    with pytest.raises(UserError, match=message):
        gold_evidence([asked], texts, "methods: gold")


def test_documents_without_a_corpus_are_refused():
    with pytest.raises(UserError, match=r"no corpus to read them in; expected data.corpus"):
        gold_evidence([question("a", evidence_ids=("p",))], None, "gold")
