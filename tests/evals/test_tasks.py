"""The tasks against an LM whose every answer is known."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from replug.config.methods import Method
from replug.data.records import Example
from replug.evals.evidence import NOTHING, Evidence
from replug.evals.language_modelling import LanguageModelling
from replug.evals.loop import Item
from replug.evals.mmlu import Mmlu, MmluQuestion
from replug.evals.open_qa import OpenQa
from replug.evals.questions import OpenQuestion
from replug.evals.results import compare
from replug.evals.retrieval import FIRST_MEASURES, Retrieval, gold_rows, retrieval_metrics
from replug.models.ensemble import Weighting
from tests.support.known_lm import KnownLM, opened, outcome_rows


def test_bits_per_byte_and_perplexity_of_a_known_distribution_are_exact():
    lm = KnownLM(lambda prefix, continuation: [math.log(1 / 8)] * 4)
    examples = [Example("a", "x ", "ab cd ef", "d"), Example("b", "x ", "äö gh", "d")]
    task = opened(LanguageModelling(examples), lm)
    results = compare(task, outcome_rows(task, {"none": NOTHING}), [], num_resamples=100)["none"]
    assert results["bpb"]["value"] == pytest.approx(24 / (8 + 7), rel=1e-6)  # 2 texts x 4 tokens x 3 bits
    assert results["token_perplexity"]["value"] == pytest.approx(8, rel=1e-6)
    assert results["word_perplexity"]["value"] == pytest.approx(2 ** (24 / 5), rel=1e-6)


def test_documents_are_mixed_as_probabilities_and_each_is_scored_once():
    lm = KnownLM(lambda prefix, continuation: [math.log({"good": 0.5, "bad": 0.1}[prefix.split("\n")[0]])])
    task = opened(LanguageModelling([Example("a", "x", "y", "d")]), lm)
    evidence = {
        "even": Evidence(("good", "bad"), np.log([0.5, 0.5])),
        "weighted": Evidence(("good", "bad"), np.log([0.75, 0.25])),
        "first": Evidence(("good",), np.zeros(1)),
    }
    outcomes = task.submit(0, evidence)()
    probability = {name: 2 ** -outcome.numbers["bits"] for name, outcome in outcomes.items()}
    assert probability == {"even": pytest.approx(0.3), "weighted": pytest.approx(0.4), "first": pytest.approx(0.5)}
    assert lm.prompts == [["good\nx", "bad\nx"]]


def question(subject, number, answer):
    return MmluQuestion(Item(f"{subject}{number}", f"question {number}", subject), ("p", "q", "r", "s"), answer)


def test_averages_over_questions_and_over_subjects_have_their_own_names():
    rights = {"anatomy": [1, 1, 1, 0], "virology": [0], "sociology": [1, 0], "astronomy": [1]}
    questions = [question(s, i, 0 if right else 1) for s, of in rights.items() for i, right in enumerate(of)]
    lm = KnownLM(lambda prefix, letter: [math.log(0.7 if letter == " A" else 0.1)])
    task = opened(Mmlu(questions, dict.fromkeys(rights, ())), lm)
    of = compare(task, outcome_rows(task, {"none": NOTHING}), [], num_resamples=100)["none"]
    values = {name: entry["value"] for name, entry in of.items()}
    assert values["accuracy"] == pytest.approx(5 / 8)
    assert values["accuracy_macro"] == pytest.approx((0.75 + 1 + 0.5 + 0) / 4)
    assert values["accuracy_categories"] == pytest.approx((3 / 5 + 1 / 2 + 1) / 3)  # other, social sciences, STEM
    assert [values[f"accuracy/{s}"] for s in ("anatomy", "astronomy", "sociology", "virology")] == [0.75, 1, 0.5, 0]
    assert values["accuracy/STEM"] == 1 and values["accuracy/other"] == pytest.approx(3 / 5)
    assert values["accuracy_macro/STEM with anatomy"] == (0.75 + 1) / 2, "as Chung et al. count it"
    assert values["accuracy_macro/other without anatomy"] == 0


def test_an_open_question_is_asked_with_its_methods_documents_and_demonstrations():
    shot = OpenQuestion(Item("s", "who?", "all"), ("me",))
    asked = OpenQuestion(Item("q", "what colour?", "all"), ("Blue",))
    lm = KnownLM(lambda prompt, _: " blue.\nQuestion: red?" if "blue" in prompt else " no idea")
    methods = [Method("none", "none", 0, False), Method("replug", "replug", 2, False)]
    book = SimpleNamespace(methods=methods, nearest=lambda method, row: "of me" if method.k else None)
    task = opened(OpenQa([asked], {"all": [shot]}, 8), lm, book)
    evidence = {"none": NOTHING, "replug": Evidence(("red", "it is blue"), np.log([0.25, 0.75]))}
    outcomes = task.submit(0, evidence)()
    assert lm.prompts == [
        ["Question: who?\nAnswer: me\n\nQuestion: what colour?\nAnswer:"],
        [
            f"Knowledge: of me\nQuestion: who?\nAnswer: me\n\nKnowledge: {text}\nQuestion: what colour?\nAnswer:"
            for text in ("red", "it is blue")
        ],
    ]
    shots = {"shots": 1.0, "dropped_shots": 0.0}
    assert outcomes["none"].numbers == {"exact_match": 0.0, "f1": 0.0, "answer_recall": 0.0, **shots}
    assert outcomes["replug"].numbers == {"exact_match": 1.0, "f1": 1.0, "answer_recall": 1.0, **shots}
    assert "final_weights" not in outcomes["replug"].detail
    moving = {"replug": replace(evidence["replug"], weighting=Weighting(0.1))}
    assert task.submit(0, moving)()["replug"].detail["final_weights"] == [0.25, 0.75], "this LM moves none"


# Retrieval, against numbers worked out by hand ---------------------------------------------------------------------

FOUND = np.array([np.arange(20) + 100 * query for query in range(5)])  # query q finds 100 q, 100 q + 1, ...
GOLD: list[dict[int, int]] = [
    {0: 1},
    {102: 1, 107: 1, 9_999: 1},
    {219: 1},
    {400: 1},
    {},
]  # first; third and eighth of three; last; never; none


def test_every_query_has_its_own_value_of_every_measure() -> None:
    values = retrieval_metrics(FOUND, GOLD)
    assert set(values) == {"Success@1", "Success@5", "Success@20", "R@1", "R@5", "R@20", "RR@10", "nDCG@10"}
    assert values["Success@1"].tolist() == [1, 0, 0, 0, 0]
    assert values["Success@5"].tolist() == [1, 1, 0, 0, 0]
    assert values["Success@20"].tolist() == [1, 1, 1, 0, 0]
    assert values["R@1"].tolist() == [1, 0, 0, 0, 0]
    assert values["R@5"] == pytest.approx([1, 1 / 3, 0, 0, 0])
    assert values["R@20"] == pytest.approx([1, 2 / 3, 1, 0, 0])
    assert values["RR@10"] == pytest.approx([1, 1 / 3, 0, 0, 0])  # the last is at rank 20
    gain = 1 / math.log2(4) + 1 / math.log2(9)  # ranks 3 and 8
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert values["nDCG@10"] == pytest.approx([1, gain / ideal, 0, 0, 0])


def test_gold_documents_that_are_not_in_the_corpus_count_and_are_never_found_among_a_few_rows() -> None:
    gold = gold_rows([{"a": 1, "gone": 1, "lost": 1}, {"gone": 1}, {}], {"a": 3, "b": 5})
    assert gold == [{3: 1, -2: 1, -3: 1}, {-1: 1}, {}]
    values = retrieval_metrics(np.array([[3], [5], [3]]), gold)
    assert values["R@1"] == pytest.approx([1 / 3, 0, 0])
    assert values["Success@20"].tolist() == [1, 0, 0]


def test_without_gold_documents_those_that_hold_an_answer_are_right() -> None:
    examples = [Item(name, "when?", "all") for name in ("a", "b", "c")]
    task = Retrieval(examples, [{}, {}, {3: 1}], FIRST_MEASURES, [("1501",), ("nowhere",), ("1501",)])
    evidence = {
        "one": Evidence(("built in 1499", "built in 1501."), np.zeros(2), (3, 4)),
        "two": Evidence(("in 1501", "1501"), np.zeros(2), (7, 8)),
    }
    ranks = [{name: of.numbers["RR@20"] for name, of in task.submit(row, evidence)().items()} for row in range(3)]
    assert ranks == [{"one": 0.5, "two": 1.0}, {"one": 0.0, "two": 0.0}, {"one": 1.0, "two": 0.0}]
