"""From what was measured to what each method answers, and which questions weights may see."""

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from replug.answering.answerer import MIN_QUESTIONS, Factors
from replug.config.errors import UserError
from replug.config.methods import parse_answering_methods
from replug.evals.internet_qa import InternetQa, factors_as_json, gold_overlap, read_factors
from replug.evals.internet_sets import InternetQuestion, is_validation
from replug.evals.loop import Item
from replug.evals.results import compare
from replug.web.passages import FoundEvidence, Passage

METHODS = parse_answering_methods(["none", "gold", "direct@1", "direct@2", "rag@2"], 10)


def question(number: int, answer: str = "blue") -> InternetQuestion:
    return InternetQuestion(Item(f"q{number}", f"what colour is {number}?", "all", ("d1", "d9")), (answer,))


QUESTIONS = [question(number) for number in range(450)]
VALIDATION = [one.example.id for one in QUESTIONS if is_validation(one)]


Answered = tuple[Sequence[Passage], Factors]


def answered(probability: float = 0.4, zero: bool = False) -> Answered:
    """Red from the first passage; red and blue from the second, where blue is likeliest."""
    shares = (1.0, 0.0) if zero else (0.6, 0.4)
    passages = tuple(
        Passage(f"It is {colour}.", f"u{n}", "T", None, n + 1, share, share, f"d{n}")
        for n, (colour, share) in enumerate(zip(("red", "BLUE"), shares, strict=True))
    )
    given = np.log([0.3, 0.2, probability])
    with np.errstate(divide="ignore"):
        shared = np.log(shares)
    factors = Factors(
        ("red", "red", "blue"),
        np.array([0, 1, 1]),
        given,
        np.full(3, -2.0),
        np.full(3, -1 / 3),
        np.full(2, -0.1),
        shared,
    )
    return passages, factors


def row(question: InternetQuestion, of: Answered, task: InternetQa) -> dict:
    """As a line of outcomes.jsonl is read back."""
    methods = {
        name: {"numbers": task.answer_numbers(answer, question), "detail": {"answer": answer}}
        for name, answer in (("none", "red"), ("gold", "Blue."))
    }
    for name, outcome in task.reranked_outcomes(question, *of).items():
        methods[name] = {"numbers": outcome.numbers, "detail": outcome.detail}
    kept = {"id": question.example.id, "group": "all", "source": "one question"}
    return json.loads(json.dumps({**kept, "methods": methods}, allow_nan=False))


def decided(tmp_path, questions=QUESTIONS, of: Answered | None = None, metric="exact_match", gold: dict | None = None):
    """The test part as a task, and its rows."""
    task = InternetQa(METHODS, questions, (), metric, gold or {}, 1)
    task.found = {one.example.id: FoundEvidence((), {}) for one in questions}
    task._identities = {"lm": "lm", "reranker": "other"}
    rows = [row(one, of or answered(), task) for one in questions]
    return task, task.settle(rows, SimpleNamespace(weights=tmp_path / "weights.json"))


@pytest.mark.parametrize("zero", [False, True])
def test_factors_survive_the_file_to_the_last_bit(zero):
    before = answered(zero=zero)[1]
    after = read_factors(json.loads(json.dumps(factors_as_json(before), allow_nan=False)))
    assert after.answers == before.answers and after.passages.tolist() == before.passages.tolist()
    for name in ("answer_given_question", "question_alone", "passage"):
        assert np.array_equal(getattr(after, name), getattr(before, name))


def test_a_smaller_number_of_passages_has_only_the_first_ones(tmp_path):
    _, rows = decided(tmp_path)
    methods = rows[0]["methods"]
    answers = {name: of["detail"]["answer"] for name, of in methods.items()}
    assert answers == {"none": "red", "gold": "Blue.", "direct@1": "red", "direct@2": "blue", "rag@2": "blue"}
    assert methods["direct@1"]["detail"]["documents"] == ["d0"] and methods["direct@2"]["detail"]["documents"] == [
        "d0",
        "d1",
    ]
    first, both = methods["direct@1"]["numbers"], methods["direct@2"]["numbers"]
    assert (first["exact_match"], both["exact_match"], methods["gold"]["numbers"]["exact_match"]) == (0.0, 1.0, 1.0)
    assert (first["best_candidate"], both["best_candidate"]) == (0.0, 1.0)
    assert (first["answer_in_evidence"], both["answer_in_evidence"]) == (0.0, 1.0)
    assert (first["copied"], both["copied"]) == (1.0, 1.0)
    assert (first["retrieval_recall"], both["retrieval_recall"]) == (0.0, 0.5)
    assert (first["passages"], both["passages"]) == (1.0, 2.0)
    assert "copied" not in methods["none"]["numbers"]


def test_results_are_of_the_test_part_and_weights_of_the_validation_part(tmp_path):
    task, rows = decided(tmp_path)
    assert MIN_QUESTIONS <= len(VALIDATION) <= 60
    assert [one["id"] for one in rows] == [one.example.id for one in QUESTIONS if one.example.id not in VALIDATION]
    assert {one["source"] for one in rows} == {"one question"}, "intervals have the clusters of variants"
    results = compare(task, rows, METHODS, num_resamples=100)
    assert results["direct@2"]["exact_match"]["n"] == 450 - len(VALIDATION)
    assert results["direct@2"]["exact_match - direct@1"]["value"] == 1.0
    fitted = json.loads((tmp_path / "weights.json").read_text())["methods"]
    assert set(fitted) == {"direct@1", "direct@2", "rag@2"}
    assert fitted["direct@2"]["num_questions"] == len(VALIDATION)
    assert fitted["direct@2"]["gain"] == fitted["rag@2"]["gain"] == 1.0
    assert fitted["direct@1"]["gain"] == 0.0 and fitted["direct@1"]["weights"] == {"answer_given_question": 1.0}


def test_other_answers_of_test_questions_change_no_weight(tmp_path):
    decided(tmp_path)
    first = (tmp_path / "weights.json").read_text()
    permuted = [one if one.example.id in VALIDATION else replace(one, answers=("red",)) for one in QUESTIONS]
    _, rows = decided(tmp_path, permuted)
    assert (tmp_path / "weights.json").read_text() == first
    assert rows[0]["methods"]["direct@2"]["numbers"]["exact_match"] == 0.0
    fitted_elsewhere = [replace(one, answers=("red",)) for one in QUESTIONS]
    decided(tmp_path, fitted_elsewhere)
    assert (tmp_path / "weights.json").read_text() != first, "those of the validation part do"


def test_without_a_validation_part_weights_are_the_defaults_and_without_a_test_part_nothing_is_decided(tmp_path):
    test = [one for one in QUESTIONS if one.example.id not in VALIDATION][:3]
    _, rows = decided(tmp_path, test)
    fitted = json.loads((tmp_path / "weights.json").read_text())["methods"]
    assert len(rows) == 3 and fitted["rag@2"]["num_questions"] == 0
    assert set(fitted["rag@2"]["weights"].values()) == {1.0}
    with pytest.raises(UserError, match=r"all \d+ questions are in the validation part, .*questions.max_questions"):
        decided(tmp_path, [one for one in QUESTIONS if one.example.id in VALIDATION])


def test_a_question_without_passages_is_answered_with_nothing_and_counts(tmp_path):
    empty = Factors((), np.zeros(0, dtype=np.int64), *(np.zeros(0) for _ in range(5)))
    _, rows = decided(tmp_path, of=((), empty))
    numbers = rows[0]["methods"]["rag@2"]["numbers"]
    assert rows[0]["methods"]["rag@2"]["detail"]["answer"] == "" and numbers["exact_match"] == 0.0
    assert numbers["passages"] == 0.0 and numbers["retrieval_recall"] == 0.0


def test_what_is_not_known_is_left_out(tmp_path):
    passages, factors = answered()
    _, rows = decided(tmp_path, of=([replace(passage, doc_id=None) for passage in passages], factors))
    numbers = rows[0]["methods"]["rag@2"]["numbers"]
    assert "retrieval_recall" not in numbers
    assert rows[0]["methods"]["rag@2"]["detail"]["documents"] == ["u0", "u1"]


def test_overlap_with_gold_evidence_is_that_of_the_best_passage_without_stop_words():
    """Gold words: Rhine, flows, Basel. The first passage has one of them, the second two."""
    passages = ["the rhine", "Basel flows, and it was"]
    assert gold_overlap("The Rhine flows through Basel.", passages) == pytest.approx(2 / 3)
    assert gold_overlap("The Rhine", []) == 0.0


def test_claims_without_evidence_have_no_overlap_and_do_not_count(tmp_path):
    told = ("It is red and blue.",)  # every second claim has another's evidence as gold, as NOT ENOUGH INFO
    claims = [replace(one, evidence=told if number % 2 else ()) for number, one in enumerate(QUESTIONS)]
    task, measured = decided(tmp_path, claims, None, "accuracy", {one.example.id: told[0] for one in claims})
    results = compare(task, measured, METHODS, num_resamples=10)
    assert results["direct@2"]["gold_overlap"]["value"] == 1 / 2, "red or blue of two words, and not a quarter"
