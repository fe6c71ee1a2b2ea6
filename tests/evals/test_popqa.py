"""PopQA: golden prompts, popularity, how questions and shots are drawn, what is asked, and what results say."""

from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.methods import parse_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, WrittenDocument
from replug.evals.loop import Item, Row
from replug.evals.popqa import (
    TEMPLATES,
    PopQa,
    PopQuestion,
    plan_shots,
    popularity_bin,
    question_of,
    read_popqa,
)
from replug.evals.questions import first_line
from replug.evals.results import compare
from replug.evals.search import genread_prompt
from replug.models.generation import Generated
from tests.support.known_lm import KnownTexts, opened

GOLDEN = Path(__file__).parent / "golden"
ASKED = "What is Ada Lovelace's occupation?"


def popular(query: str, obj: str = "") -> PopQuestion:
    return PopQuestion(Item(query, query, "x"), (obj,), "subject", obj, 10.0)


SHOTS = [
    popular("In what city was Frédéric Chopin born?", "Żelazowa Wola"),
    popular("What is the capital of Chad?", "N'Djamena"),
]
PASSAGES = ["Fryderyk Chopin\nChopin was born in Żelazowa Wola.\n", "N'Djamena is the capital of Chad."]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("zero_shot", PopQa.prompt(popular(ASKED))),
        ("few_shot", PopQa.prompt(popular(ASKED), [(shot, None) for shot in SHOTS])),
        (
            "with_passages",
            PopQa.prompt(
                popular(ASKED),
                list(zip(SHOTS, PASSAGES, strict=True)),
                "Ada Lovelace\nAda was a mathematician.",
            ),
        ),
        ("genread", genread_prompt(ASKED)),
    ],
)
def test_prompts_are_the_golden_files(name: str, prompt: str):
    assert prompt == (GOLDEN / f"popqa_{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def test_an_answer_is_its_first_line_after_a_blank_one():
    generated = [" Paris\nQ: who", "\n\nParis is a city.\nAnd more", "\nParis", "", " Paris"]
    # As in the official code one newline ends an empty line.
    assert list(map(first_line, generated)) == ["Paris", "Paris is a city.", "", "", "Paris"]


def test_a_bin_is_a_power_of_ten_whose_lower_end_belongs_to_it():
    bins = {0: "0", 1: "10^0-10^1", 9: "10^0-10^1", 10: "10^1-10^2", 999: "10^2-10^3", 1000: "10^3-10^4"}
    bins[10**15] = "10^15-10^16"
    for popularity, name in bins.items():
        assert popularity_bin(float(popularity)) == f"popularity {name}"


def question(relation: str, number: int) -> PopQuestion:
    subject = f"subject {number}"
    example = Item(f"{relation} {number}", question_of(relation, subject), relation)
    return PopQuestion(example, ("x",), subject, f"object {number}", 10.0)


def pool(num_relations: int, each: int) -> list[PopQuestion]:
    return [question(relation, number) for number in range(each) for relation in list(TEMPLATES)[:num_relations]]


def test_the_published_table_is_read(tmp_path):
    path = tmp_path / "popQA.tsv"
    path.write_text(
        "id\tsubj\tprop\tobj\ts_pop\to_pop\tquestion\tpossible_answers\n"
        '4222362\tGeorge Rankin\toccupation\tpolitician\t142\t25692\t"What is George Rankin\'s occupation?"\t'
        '"[""politician"", ""pol""]"\n'
        "5\tChad\tcapital\tN'Djamena\t99\t\tWhat is the capital of Chad?\t[\"N'Djamena\"]\n"
    )
    first, second = read_popqa(path)
    assert (first.example.id, first.answers, first.popularity) == ("4222362", ("politician", "pol"), 142.0)
    assert (second.object, second.answers) == ("N'Djamena", ("N'Djamena",))
    path.write_text(path.read_text().replace("o_pop", "s_pop", 1))
    with pytest.raises(UserError, match="two columns named 's_pop'"):
        read_popqa(path)


def test_shots_are_one_of_each_other_relation_in_an_order_of_the_seed_and_never_evaluated():
    plans = [plan_shots(pool(16, 4), None, 15, seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    asked, shots = plans[0]
    assert len(asked) == 16 * 3, "each relation gave one question away"
    for relation, shown in shots.items():
        assert Counter(shot.relation for shot in shown) == {other: 1 for other in shots if other != relation}
        assert not {shot.example.id for shot in shown} & {question.example.id for question in asked}
    relations = [shot.relation for shot in shots["occupation"]]
    assert relations != sorted(relations), "shuffled, not relation by relation"
    same = pool(3, 6)  # and of another file
    asked, shots = plan_shots(same, same[:3], 4, 0)
    assert {q.example.id for q in asked} == {q.example.id for q in same[:3]}
    assert not {q.example.id for q in asked} & {s.example.id for of in shots.values() for s in of}
    assert Counter(shot.relation for shot in shots["occupation"]) == {"place of birth": 2, "genre": 2}


# The task -------------------------------------------------------------------------------------------------------------


TEXTS = ["Ada was a poet.", "Ada was a baker.", "Chad's capital is N'Djamena."]
METHODS = ["none", "bm25@1", "replug", "genread", "random"]
BORN = Item("bo", "In what city was Bo born?", "place of birth")
TASK_SHOTS = [PopQuestion(BORN, ("Rome",), "Bo", "Rome", 10.0)]


class Poet:
    """An LM that says poet where the prompt does, and keeps what it was asked. It tells what it is made to tell."""

    def __init__(self, entropies=True, prompt_tokens: int | None = 100):
        self.asked, self._entropies, self._tokens = [], entropies, prompt_tokens

    def submit_call(self, call):
        [mixture], options = call.prompts, call.options
        prompts = mixture.prompts
        self.asked.append((list(prompts), list(mixture.weights), options))
        text = " A POET, or poet\nQ: next" if any("poet" in prompt for prompt in prompts) else " no idea"
        logprobs = np.array([-1.0, -3.0], dtype=np.float32)
        entropies = np.array([0.5, 1.0], dtype=np.float32) if self._entropies else None
        done: Future[list[Generated]] = Future()
        done.set_result([Generated(text, logprobs, entropies, np.array(mixture.weights), self._tokens)])
        return done


def asked_question(number: int, relation: str, popularity: float, answer: str = "poet") -> PopQuestion:
    example = Item(str(number), f"asked_question {number}?", relation)
    return PopQuestion(example, (answer, "bard"), f"subject {number}", answer, popularity)


QUESTIONS = [
    asked_question(0, "occupation", 5.0),
    asked_question(1, "occupation", 50_000.0, "painter"),
]


def book(names=METHODS, written_tokens: int | None = 30, **more) -> EvidenceBook:
    """Evidence of two questions and of the demonstration, whose first document is of Chad."""
    similarities = np.array([[3.0, 1.0, 0.5], [2.0, 2.0, 1.0], [2.0, 2.0, 1.0]])
    rows = RetrievedDocuments(np.array([[0, 1, 2], [1, 2, 0], [2, 1, 0]]), similarities)
    found = dict.fromkeys(("replug", "random", "bm25"), rows)
    written = [WrittenDocument("A poet it was.", written_tokens, 20), *[WrittenDocument(None, written_tokens, 4)] * 2]
    methods = parse_methods(list(names), 2, {"replug": "path"})
    return EvidenceBook(methods, KnownTexts(TEXTS), found, [True] * 3, written, **more)


def task(lm, shots=TASK_SHOTS, asked=QUESTIONS, of=None) -> PopQa:
    return opened(PopQa(asked, {"occupation": shots}, 15), lm, of or book())


def measured(lm=None, **settings) -> list[Row]:
    """Rows as the outcomes' file holds them."""
    of = book()
    some = task(lm or Poet(), of=of, **settings)
    rows = []
    for row, example in enumerate(some.examples):
        outcomes = some.submit(row, of.of(row))()
        methods = {name: {"numbers": o.numbers, "detail": o.detail} for name, o in outcomes.items()}
        rows.append({"id": example.id, "group": example.group, "methods": methods})
    return rows


def test_every_method_asks_with_its_documents_after_the_shots_of_the_relation():
    lm = Poet()
    task(lm).submit(0, book().of(0))()
    shot = "Q: In what city was Bo born? A: Rome\n\n"
    with_document = f"{TEXTS[2]}\n\n{shot}"
    asked = "Q: asked_question 0? A:"
    prompts = dict(zip(METHODS, [some for some, _, _ in lm.asked], strict=True))
    assert prompts["none"] == [f"{shot}{asked}"]
    assert prompts["bm25@1"] == [f"{with_document}{TEXTS[0]}\n\n{asked}"]
    assert prompts["replug"] == [f"{with_document}{text}\n\n{asked}" for text in TEXTS[:2]]
    assert prompts["genread"] == [f"{shot}A poet it was.\n\n{asked}"]
    weights = np.exp([3.0, 1.0]) / np.exp([3.0, 1.0]).sum()
    assert lm.asked[2][1] == pytest.approx(list(weights))
    assert {options.opening for _, _, options in lm.asked} == {shot, with_document}
    assert {(options.max_new_tokens, options.stop, options.temperature) for _, _, options in lm.asked} == {
        (15, "\n", 0.0)
    }


def test_an_outcome_holds_rightness_costs_and_signals():
    [first, second] = measured()
    numbers = {name: of["numbers"] for name, of in first["methods"].items()}
    assert numbers["none"] == {
        "accuracy": 0.0,
        "answer_recall": 0.0,
        "popularity": 5.0,
        "lm_calls": 1.0,
        "retriever_calls": 0.0,
        "prompt_tokens": 100.0,
        "generated_tokens": 2.0,
        "shots": 1.0,
        "dropped_shots": 0.0,
        "mean_logprob": -2.0,
        "mean_entropy": 0.75,
    }
    assert numbers["bm25@1"] == numbers["none"] | {
        **dict.fromkeys(("accuracy", "answer_recall", "retriever_calls"), 1.0),
        "top_score": 3.0,
    }
    assert (numbers["replug"]["lm_calls"], numbers["replug"]["retriever_calls"]) == (2.0, 1.0)
    assert (numbers["genread"]["lm_calls"], numbers["genread"]["retriever_calls"]) == (2.0, 0.0)
    assert (numbers["genread"]["prompt_tokens"], numbers["genread"]["generated_tokens"]) == (130.0, 22.0)
    assert numbers["random"]["retriever_calls"] == 0 and "top_score" not in numbers["random"]
    assert first["methods"]["none"]["detail"] == {
        "answer": "no idea",
        "relation": "occupation",
        "subject": "subject 0",
    }
    assert first["methods"]["bm25@1"]["detail"]["answer"] == "A POET, or poet", "its first line"
    assert second["methods"]["genread"]["numbers"]["answer_recall"] == 0.0, "nothing was written"


def test_what_is_not_known_is_left_out_and_never_zero():
    lm = Poet(entropies=False, prompt_tokens=None)
    asked = [asked_question(0, "occupation", 5.0)]
    numbers = {name: of["numbers"] for name, of in measured(lm, asked=asked)[0]["methods"].items()}
    for of in numbers.values():
        assert not {"mean_entropy", "prompt_tokens"} & of.keys()
        assert of["mean_logprob"] == -2.0
    of = task(lm, [], asked, book(["none"]))
    rows = [{"methods": {"none": {"numbers": numbers["none"], "detail": {}}}}]
    assert "prompt_tokens" not in compare(of, rows, [], num_resamples=100)["none"]
