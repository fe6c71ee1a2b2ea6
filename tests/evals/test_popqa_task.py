"""PopQA as a task: what the LM is asked, what an outcome holds, what the results say of popularity."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from replug.config.evaluation_schema import PaperConfig
from replug.config.methods import parse_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, WrittenDocument
from replug.evals.few_shot import Asking, FewShot
from replug.evals.loop import Item
from replug.evals.outcomes import Row
from replug.evals.popqa import FORM, PopQa, PopQuestion, add_popqa_findings, with_counts
from replug.evals.results import compare
from replug.evals.tables import to_markdown
from replug.models.ensemble import Weighting
from replug.models.generation import Generated
from replug.models.prompt import PromptTemplate
from tests.support.known_lm import KnownTexts

TEXTS = ["Ada was a poet.", "Ada was a baker.", "Chad's capital is N'Djamena."]
METHODS = ["none", "bm25@1", "replug", "genread", "random"]
EVERYTHING = FewShot(PromptTemplate("\n"), PromptTemplate("\n"), 15)  # fits
BORN = Item("bo", "In what city was Bo born?", "place of birth")
SHOTS = [(PopQuestion(BORN, ("Rome",), "Bo", "Rome"), None)]


class Poet:
    """An LM that says poet where the prompt does, and keeps what it was asked. It tells what it is made to tell."""

    def __init__(self, entropies=True, prompt_tokens: int | None = 100):
        self.moving = []  # the share and the `prune` of each mixture
        self.asked, self._entropies, self._tokens = [], entropies, prompt_tokens

    def submit_call(self, call):
        [mixture], options = call.prompts, call.options
        prompts = mixture.prompts
        self.moving.append((mixture.weighting.share, mixture.weighting.prune))
        self.asked.append((list(prompts), list(mixture.weights), options))
        text = " A POET, or poet\nQ: next" if any("poet" in prompt for prompt in prompts) else " no idea"
        logprobs = np.array([-1.0, -3.0], dtype=np.float32)
        entropies = np.array([0.5, 1.0], dtype=np.float32) if self._entropies else None
        done: Future[list[Generated]] = Future()
        done.set_result([Generated(text, logprobs, entropies, np.array(mixture.weights), self._tokens)])
        return done


def question(
    number: int, relation: str, popularity: float | None, answer: str = "poet", frequency: int | None = 0
) -> PopQuestion:
    example = Item(str(number), f"question {number}?", relation)
    return PopQuestion(example, (answer, "bard"), f"subject {number}", answer, popularity, frequency, "poet")


ASKED = [
    question(0, "occupation", 5.0, frequency=7),
    question(1, "occupation", 50_000.0, "painter"),
]


def book(names=METHODS, written_tokens: int | None = 30, **more) -> EvidenceBook:
    rows = RetrievedDocuments(np.array([[0, 1, 2], [1, 2, 0]]), np.array([[3.0, 1.0, 0.5], [2.0, 2.0, 1.0]]))
    found = dict.fromkeys(("replug", "random", "bm25"), rows)
    written = [WrittenDocument("A poet it was.", written_tokens, 20), WrittenDocument(None, written_tokens, 4)]
    methods = parse_methods(list(names), 2, {"replug": "path"})
    return EvidenceBook(methods, KnownTexts(TEXTS), found, [True, True], written, **more)


def task(lm, shots=SHOTS, asked=ASKED, of=None) -> PopQa:
    of = of or book()
    by_method = {(method.name, "occupation"): shots for method in of.methods}
    return PopQa(Asking(lm, EVERYTHING, FORM, by_method), asked, of, 15)


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
    asked = "Q: question 0? A:"
    prompts = dict(zip(METHODS, [some for some, _, _ in lm.asked], strict=True))
    assert prompts["none"] == [f"{shot}{asked}"]
    assert prompts["bm25@1"] == [f"{shot}{TEXTS[0]}\n\n{asked}"]
    assert prompts["replug"] == [f"{shot}{text}\n\n{asked}" for text in TEXTS[:2]]
    assert prompts["genread"] == [f"{shot}A poet it was.\n\n{asked}"]
    weights = np.exp([3.0, 1.0]) / np.exp([3.0, 1.0]).sum()
    assert lm.asked[2][1] == pytest.approx(list(weights))
    assert {options.opening for _, _, options in lm.asked} == {shot}
    assert {(options.max_new_tokens, options.stop, options.temperature) for _, _, options in lm.asked} == {
        (15, "\n", 0.0)
    }


def test_two_weightings_are_two_answers_of_the_same_prompts():
    asked, lm = book(["replug", "replug/posterior"], posterior=Weighting(0.1, prune=0.01)), Poet()
    task(lm, of=asked).submit(0, asked.of(0))()
    (fixed, even, _), (prompts, weights, _) = lm.asked
    assert (prompts, weights) == (fixed, even)
    assert lm.moving == [(1.0, 0.0), (0.1, 0.01)]


def test_an_outcome_holds_rightness_costs_and_signals():
    [first, second] = measured()
    numbers = {name: of["numbers"] for name, of in first["methods"].items()}
    assert numbers["none"] == {
        "accuracy": 0.0,
        "answer_recall": 0.0,
        "most_frequent_accuracy": 1.0,
        "popularity": 5.0,
        "frequency": 7.0,
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
        "popularity_from": "s_pop",
        "most_frequent_answer": "poet",
    }
    assert first["methods"]["bm25@1"]["detail"]["answer"] == "A POET, or poet", "its first line"
    assert second["methods"]["none"]["numbers"]["most_frequent_accuracy"] == 0.0, "a painter it was"
    assert second["methods"]["genread"]["numbers"]["answer_recall"] == 0.0, "nothing was written"


def test_what_is_not_known_is_left_out_and_never_zero():
    lm = Poet(entropies=False, prompt_tokens=None)
    asked = [question(0, "occupation", 5.0, frequency=None)]
    numbers = {name: of["numbers"] for name, of in measured(lm, asked=asked)[0]["methods"].items()}
    for of in numbers.values():
        assert not {"mean_entropy", "prompt_tokens", "frequency"} & of.keys()
        assert of["mean_logprob"] == -2.0
    of = PopQa(Asking(lm, EVERYTHING, FORM, {("none", "occupation"): []}), asked, book(["none"]), 15)
    rows = [{"methods": {"none": {"numbers": numbers["none"], "detail": {}}}}]
    assert "prompt_tokens" not in compare(of, rows, [], PaperConfig(), 100, 0)["none"]


def test_popularity_that_no_question_tells_is_the_frequency_in_the_corpus():
    asked = [question(0, "occupation", None, frequency=12)]
    outcome = measured(asked=asked)[0]["methods"]["none"]
    assert outcome["numbers"]["popularity"] == outcome["numbers"]["frequency"] == 12.0
    assert outcome["detail"]["popularity_from"] == "corpus"
    assert task(Poet(), asked=asked).groups(asked[0].example) == ("occupation", "popularity 10^1-10^2")


def test_results_have_the_most_frequent_answer_and_the_correlation():
    popularity, right = [1, 10, 100, 1000, 5, 50], [0, 0, 1, 1, 0, 1]
    asked = [question(n, "mother" if n % 2 else "father", p) for n, p in enumerate(popularity)]
    rows = [
        {
            "id": str(number),
            "methods": {
                "none": {
                    "numbers": {
                        **dict.fromkeys(PopQa.metrics, 0.0),
                        "accuracy": float(is_right),
                        "most_frequent_accuracy": float(number < 2),
                        "dropped_shots": 2.0 * (number == 3),
                        "popularity": one.popularity,
                    },
                    "detail": {
                        "relation": one.relation,
                        "popularity_from": "s_pop",
                        "most_frequent_answer": f"{one.relation}'s",
                    },
                }
            },
        }
        for number, (one, is_right) in enumerate(zip(asked, right, strict=True))
    ]
    by_method = {("none", relation): [] for relation in ("mother", "father")}
    some = PopQa(Asking(Poet(), EVERYTHING, FORM, by_method), asked, book(["none"]), 15)
    results = compare(some, rows, [], PaperConfig(), 100, 0)
    lines = to_markdown(add_popqa_findings(SimpleNamespace(rows=rows, results=results, book=book(["none"]))))
    assert "none: 1 of 6 questions lost their earliest demonstrations, 2 in all: the LM holds no more tokens." in lines
    of = results["none"]
    assert of["accuracy/father"]["n"] == 3 and of["accuracy/popularity 10^0-10^1"]["n"] == 2
    assert of["accuracy"]["most_frequent_answer"] == pytest.approx(2 / 6)
    logs = np.log10(popularity)
    assert of["correlation"]["value"] == pytest.approx(np.corrcoef(logs, right)[0, 1])
    assert of["correlation/mother"]["n"] == 3
    assert "monthly page views" in lines
    assert "| all | 6 | 0.333 |" in lines and "| mother | 3 | 0.333 |" in lines


def test_the_most_frequent_answer_is_counted_on_the_other_questions():
    objects = {"occupation": ["poet", "poet", "painter"], "mother": ["Ann"]}
    questions = [question(n, of, 5.0, one) for of, some in objects.items() for n, one in enumerate(some)]
    assert [one.most_frequent_answer for one in with_counts(questions, None)] == ["poet", "poet", "poet", ""]
