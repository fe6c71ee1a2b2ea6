"""From what was measured to what each method answers, and which questions weights may see."""

import json
from dataclasses import replace

import numpy as np
import pytest

from replug.answering.answerer import Answered
from replug.answering.rerankers import MIN_QUESTIONS, RERANKERS, Candidate, Factors
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig, PaperConfig, QuestionsConfig
from replug.config.methods import parse_answering_methods
from replug.evals.internet_deciding import (
    LineTokens,
    answer_numbers,
    cost_numbers,
    decide,
    factors_as_json,
    gold_overlap,
    read_factors,
    reranked_outcomes,
    reranking_costs,
)
from replug.evals.internet_sets import InternetQuestion, Prepared, is_validation
from replug.evals.loop import Item
from replug.evals.results import compare, paper_of_dataset
from replug.web.records import FoundEvidence, Passage

METHODS = parse_answering_methods(["none", "gold", "direct@1", "direct@2", "rag@2"], 10)
LINES = LineTokens(100, 10, (20, 30), {"red": 2, "blue": 2})
SIZES = (10.0, 1.0)


def question(number: int, answer: str = "blue") -> InternetQuestion:
    return InternetQuestion(Item(f"q{number}", f"what colour is {number}?", "all", ("d1", "d9")), (answer,))


QUESTIONS = [question(number) for number in range(450)]
VALIDATION = [one.example.id for one in QUESTIONS if is_validation(one)]


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
    candidates = (Candidate("red", 0, -1.0), Candidate("red", 1, -2.0), Candidate("blue", 1, -1.0))
    return Answered("what colour?", passages, candidates, factors, {}, (7, 9))


def row(question: InternetQuestion, of: Answered, prepared: Prepared, lines=(LINES, LINES)) -> dict:
    """As a line of outcomes.jsonl is read back."""
    methods = {
        name: {
            "numbers": answer_numbers(prepared.metric, answer, question) | cost_numbers(SIZES, 1, 50, 100),
            "detail": {"answer": answer},
        }
        for name, answer in (("none", "red"), ("gold", "Blue."))
    }
    for name, outcome in reranked_outcomes(prepared, question, of, lines, SIZES).items():
        methods[name] = {"numbers": outcome.numbers, "detail": outcome.detail}
    kept = {"id": question.example.id, "group": "all", "source": "one question"}
    return json.loads(json.dumps({**kept, "methods": methods}, allow_nan=False))


def prepared(questions=QUESTIONS, metric="exact_match", methods=METHODS) -> Prepared:
    found = {one.example.id: FoundEvidence("", (), {}) for one in questions}
    return Prepared(tuple(methods), tuple(questions), (), metric, False, {}, found)


def decided(tmp_path, questions=QUESTIONS, of: Answered | None = None, lines=(LINES, LINES), **settings):
    asked = prepared(questions, **settings)
    rows = [row(one, of or answered(), asked, lines) for one in questions]
    return decide(asked, rows, tmp_path / "weights.json", "lm", "other")


@pytest.mark.parametrize("zero", [False, True])
def test_factors_survive_the_file_to_the_last_bit(zero):
    before = answered(zero=zero).factors
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
    assert first["prompt_tokens"] == 130 and both["prompt_tokens"] == 130 + 140, "samples have their log-probs"
    assert first["generated_tokens"] == 7 and first["lm_calls"] == 1
    assert first["flop"] == 2 * (130 + 7) * 10
    assert "copied" not in methods["none"]["numbers"] and methods["none"]["numbers"]["flop"] == 2 * 150 * 10


def test_results_are_of_the_test_part_and_weights_of_the_validation_part(tmp_path):
    task, rows = decided(tmp_path)
    assert MIN_QUESTIONS <= len(VALIDATION) <= 60
    assert [one["id"] for one in rows] == [one.example.id for one in QUESTIONS if one.example.id not in VALIDATION]
    assert {one["source"] for one in rows} == {"one question"}, "intervals have the clusters of variants"
    results = compare(task, rows, METHODS, PaperConfig(), 100, 0)
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
    _, rows = decided(tmp_path, of=Answered("q", (), (), empty, {}, ()))
    numbers = rows[0]["methods"]["rag@2"]["numbers"]
    assert rows[0]["methods"]["rag@2"]["detail"]["answer"] == "" and numbers["exact_match"] == 0.0
    assert numbers["passages"] == 0.0 and numbers["retrieval_recall"] == 0.0 and numbers["lm_calls"] == 0.0


def test_what_is_not_known_is_left_out(tmp_path):
    of = answered()
    unknown = replace(of, passages=tuple(replace(passage, doc_id=None) for passage in of.passages))
    _, rows = decided(tmp_path, of=unknown, lines=())
    numbers = rows[0]["methods"]["rag@2"]["numbers"]
    assert not {"retrieval_recall", "flop", "lm_calls", "prompt_tokens"} & numbers.keys()
    assert rows[0]["methods"]["rag@2"]["detail"]["documents"] == ["u0", "u1"]


def test_overlap_with_gold_evidence_is_that_of_the_best_passage_without_stop_words():
    """Gold words: Rhine, flows, Basel. The first passage has one of them, the second two."""
    passages = ["the rhine", "Basel flows, and it was"]
    assert gold_overlap("The Rhine flows through Basel.", passages) == pytest.approx(2 / 3)
    assert gold_overlap("The Rhine", []) == 0.0


def test_claims_without_evidence_have_no_overlap_and_do_not_count(tmp_path):
    told = ("It is red and blue.",)  # every second claim has another's evidence as gold, as NOT ENOUGH INFO
    claims = [replace(one, evidence=told if number % 2 else ()) for number, one in enumerate(QUESTIONS)]
    of = replace(prepared(claims, "accuracy"), gold={one.example.id: told[0] for one in claims})
    rows = [row(one, answered(), of) for one in claims]
    task, measured = decide(of, rows, tmp_path / "weights.json", "lm", "other")
    results = compare(task, measured, METHODS, PaperConfig(), 10, 0)
    assert results["direct@2"]["gold_overlap"]["value"] == 1 / 2, "red or blue of two words, and not a quarter"


def test_a_papers_table_shows_the_figures_of_the_data_set_that_is_measured():
    groups = {"nq": {"poe@50": 0.384}, "nq copied": {"direct@50": 0.894}, "fever": {"poe@50": 0.572}}
    config = EvaluationConfig("internet_qa", "out", questions=QuestionsConfig(dataset="nq"))
    shown = paper_of_dataset(replace(config, paper=PaperConfig("table 1", groups=groups)))
    assert (shown.values, shown.groups) == ({"poe@50": 0.384}, {"copied": {"direct@50": 0.894}})


# Costs, against sums by hand ------------------------------------------------------------------------------------------


# 100 tokens of shots, a question of 10, two passages of 20 and 30, answers of 2 and 3; "b" came from both passages.
COUNTED = LineTokens(100, 10, [20, 30], {"a": 2, "b": 3})
FACTORS = Factors(
    ("a", "b", "b"),
    np.array([0, 0, 1]),
    *(np.full(3, -1.0) for _ in range(3)),
    *(np.full(2, -1.0) for _ in range(2)),
)
ASKED = (100 + 20 + 10) + (100 + 30 + 10)  # the two prompts that answers are sampled from
GIVEN = (130 + 2) + (130 + 3) + (140 + 3)  # p(a|q,p), or p(q|a,p), of each candidate
ALONE = (120 + 2) + (120 + 3) + (130 + 3)  # p(a|p)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("reranker", "calls", "scored"),
    [
        ("direct", 0, 0),
        ("rag", 0, 0),
        ("noisy_channel", 8, GIVEN + ALONE + ASKED),
        ("poe", 8, GIVEN + ALONE + ASKED),
    ],
)
def test_a_reranker_costs_the_factors_that_it_reads(reranker, calls, scored):
    found = reranking_costs(RERANKERS[reranker], FACTORS, COUNTED, COUNTED, [7, 9], [Candidate("a", 0, -1.0)])
    assert found == (calls + 2, ASKED, 16, scored)
    some = [Candidate("a", 0), Candidate("b", 2)]
    cut = reranking_costs(RERANKERS[reranker], FACTORS, COUNTED, COUNTED, [7, 9], some)
    assert cut == (calls + 3, ASKED + 130 + 2, 16, scored), "the LM scores a sample that was cut, with its end"


def test_flop_are_two_for_each_parameter_and_token_of_its_own_lm_and_left_out_where_unknown():
    assert cost_numbers((50.0, 3.0), 2, 100, 10, 1000)["flop"] == 2 * (110 * 50 + 1000 * 3)
    unknown = cost_numbers((None, 3.0), 2, 100, 10, 1000)
    assert unknown == {"lm_calls": 2.0, "prompt_tokens": 1100.0, "generated_tokens": 10.0}
