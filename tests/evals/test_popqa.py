"""PopQA: golden prompts, popularity, how questions and shots are drawn, what is asked, and every way to answer."""

from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.errors import UserError
from replug.config.methods import parse_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, WrittenDocument
from replug.evals.loop import Item, outcome_rows
from replug.evals.popqa import TEMPLATES, PopQa, PopQuestion, plan_shots, popularity_bin, question_of, read_popqa
from replug.evals.questions import first_line
from replug.evals.results import compare
from replug.evals.search import genread_prompt
from replug.models.generation import Generated
from tests.support.evaluating import evaluated, typed
from tests.support.known_lm import KnownTexts, opened
from tests.support.preparing import write_jsonl

GOLDEN = Path(__file__).parent / "golden"
ASKED = "What is Ada Lovelace's occupation?"


def popular(query: str, obj: str = "") -> PopQuestion:
    return PopQuestion(Item(query, query, "x"), (obj,), "subject", obj, 10.0)


CHOPIN = popular("In what city was Frédéric Chopin born?", "Żelazowa Wola")
CHAD = popular("What is the capital of Chad?", "N'Djamena")
BORN_THERE, CAPITAL = "Fryderyk Chopin\nChopin was born in Żelazowa Wola.\n", "N'Djamena is the capital of Chad."
DOCUMENT = "Ada Lovelace\nAda was a mathematician."
PROMPTS = {
    "zero_shot": PopQa.prompt(popular(ASKED)),
    "few_shot": PopQa.prompt(popular(ASKED), [(CHOPIN, None), (CHAD, None)]),
    "with_passages": PopQa.prompt(popular(ASKED), [(CHOPIN, BORN_THERE), (CHAD, CAPITAL)], DOCUMENT),
    "genread": genread_prompt(ASKED),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_the_golden_files(name: str):
    assert PROMPTS[name] == (GOLDEN / f"popqa_{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def test_an_answer_is_its_first_line_after_a_blank_one():
    generated = [" Paris\nQ: who", "\n\nParis is a city.\nAnd more", "\nParis", "", " Paris"]
    # As in the official code one newline ends an empty line.
    assert list(map(first_line, generated)) == ["Paris", "Paris is a city.", "", "", "Paris"]


def test_a_bin_is_a_power_of_ten_whose_lower_end_belongs_to_it():
    bins = {0: "0", 9: "10^0-10^1", 10: "10^1-10^2", 999: "10^2-10^3", 1000: "10^3-10^4", 10**15: "10^15-10^16"}
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


def asked_question(number: int, popularity: float, answer: str = "poet") -> PopQuestion:
    example = Item(str(number), f"asked_question {number}?", "occupation")
    return PopQuestion(example, (answer, "bard"), f"subject {number}", answer, popularity)


QUESTIONS = [asked_question(0, 5.0), asked_question(1, 50_000.0, "painter")]


def book(names=METHODS) -> EvidenceBook:
    """Evidence of two questions and of the demonstration, whose first document is of Chad."""
    similarities = np.array([[3.0, 1.0, 0.5], [2.0, 2.0, 1.0], [2.0, 2.0, 1.0]])
    rows = RetrievedDocuments(np.array([[0, 1, 2], [1, 2, 0], [2, 1, 0]]), similarities)
    found = dict.fromkeys(("replug", "random", "bm25"), rows)
    written = [WrittenDocument("A poet it was.", 30, 20), *[WrittenDocument(None, 30, 4)] * 2]
    methods = parse_methods(list(names), 2, {"replug": "path"})
    return EvidenceBook(methods, KnownTexts(TEXTS), found, [True] * 3, written)


def task(lm, names=METHODS) -> PopQa:
    return opened(PopQa(QUESTIONS, {"occupation": TASK_SHOTS}, 15), lm, book(names))


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
    how = {(options.max_new_tokens, options.stop, options.temperature) for _, _, options in lm.asked}
    assert how == {(15, "\n", 0.0)}


def test_an_outcome_holds_rightness_costs_and_signals():
    [first, second] = outcome_rows(task(Poet()), book())
    numbers = {name: of["numbers"] for name, of in first["methods"].items()}
    costs = {"lm_calls": 1.0, "retriever_calls": 0.0, "prompt_tokens": 100.0, "generated_tokens": 2.0}
    signals = {"mean_logprob": -2.0, "mean_entropy": 0.75, "popularity": 5.0}
    shots = {"shots": 1.0, "dropped_shots": 0.0}
    assert numbers["none"] == {"accuracy": 0.0, "answer_recall": 0.0, **costs, **signals, **shots}
    found = dict.fromkeys(("accuracy", "answer_recall", "retriever_calls"), 1.0)
    assert numbers["bm25@1"] == {**numbers["none"], **found, "top_score": 3.0}
    assert (numbers["replug"]["lm_calls"], numbers["replug"]["retriever_calls"]) == (2.0, 1.0)
    assert (numbers["genread"]["lm_calls"], numbers["genread"]["retriever_calls"]) == (2.0, 0.0)
    assert (numbers["genread"]["prompt_tokens"], numbers["genread"]["generated_tokens"]) == (130.0, 22.0)
    assert numbers["random"]["retriever_calls"] == 0 and "top_score" not in numbers["random"]
    said = {"answer": "no idea", "relation": "occupation", "subject": "subject 0"}
    assert first["methods"]["none"]["detail"] == said
    assert first["methods"]["bm25@1"]["detail"]["answer"] == "A POET, or poet", "its first line"
    assert second["methods"]["genread"]["numbers"]["answer_recall"] == 0.0, "nothing was written"


def test_what_is_not_known_is_left_out_and_never_zero():
    measured = task(Poet(entropies=False, prompt_tokens=None), ["none"])
    rows = list(outcome_rows(measured, book(["none"])))
    numbers = rows[0]["methods"]["none"]["numbers"]
    assert not {"mean_entropy", "prompt_tokens"} & numbers.keys() and numbers["mean_logprob"] == -2.0
    assert "prompt_tokens" not in compare(measured, rows, [], num_resamples=100)["none"]


WAYS = ["none", "random@1", "bm25@1", "replug@1", "replug", "replug@2/concat", "genread"]
WORK = ["writer", "baker", "singer"]


# `replug evaluate` on stand-ins ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twelve people, of whom half have a document that says their work once and their town often."""
    folder = tmp_path_factory.mktemp("popqa")
    people = [f"Person{number}" for number in range(12)]
    questions = [
        {"id": f"{name} {prop}", "subj": name, "prop": prop, "obj": obj, "s_pop": 3**number, "possible_answers": [obj]}
        for number, name in enumerate(people)
        for prop, obj in (("occupation", WORK[number % 3]), ("place of birth", f"Town{number}"))
    ]
    write_jsonl(folder / "questions.jsonl", questions)
    texts = [f"{name} is a {WORK[number % 3]} of{f' Town{number}' * 9}" for number, name in enumerate(people[:6])]
    write_jsonl(folder / "corpus.jsonl", [{"id": f"d{n}", "text": text} for n, text in enumerate([*texts, "no one"])])
    return folder


def keys(data: Path, out: Path) -> list[str]:
    questions = [f"questions.path={data / 'questions.jsonl'}", "questions.shots=2", "questions.max_new_tokens=2"]
    return typed("popqa", f"out={out}", *questions, "k=3", "lm.path=stand_in")


@pytest.mark.slow
def test_every_way_to_answer_is_measured_with_its_costs(replug, data, tmp_path):
    out = tmp_path / "out"
    retriever = [f"data.corpus={data / 'corpus.jsonl'}", "retriever.path=stand_in", "index.dtype=float32"]
    results, _ = evaluated(replug, out, *keys(data, out), *retriever, f"methods=[{','.join(WAYS)}]")
    assert list(results) == WAYS
    value = {name: {metric: entry["value"] for metric, entry in of.items()} for name, of in results.items()}
    assert results["none"]["accuracy"]["n"] == 20, "two of each relation are shown and not asked"
    assert [value[name]["lm_calls"] for name in WAYS] == [1, 1, 1, 1, 3, 1, 2]
    assert [value[name]["retriever_calls"] for name in WAYS] == [0, 0, 1, 1, 1, 1, 0]
    assert value["none"]["answer_recall"] == 0 < value["bm25@1"]["answer_recall"] < 1
    assert value["genread"]["prompt_tokens"] > value["none"]["prompt_tokens"]
    assert {"accuracy/occupation", "accuracy/popularity 10^0-10^1"} <= results["bm25@1"].keys()
    low, high = results["bm25@1"]["accuracy"]["interval"]
    assert value["none"]["accuracy"] == 0 < low < value["bm25@1"]["accuracy"] < high, "the stand-in repeats the town"
    rows = pq.read_table(out / "examples.parquet").to_pylist()
    assert len(rows) == 20 * len(WAYS)
    of_bm25 = [row for row in rows if row["method"] == "bm25@1"]
    assert all(row["top_score"] is not None and row["documents"] for row in of_bm25)


def test_without_a_corpus_the_lm_answers_alone_or_from_its_own_document(data, tmp_path):
    own = ["data.corpus=null", "methods=[none,genread]", "questions.shots=0"]
    results, _ = evaluated(None, tmp_path / "out", *keys(data, tmp_path / "out"), *own)
    assert results["genread"]["accuracy"]["n"] == 24
    rows = pq.read_table(tmp_path / "out/examples.parquet").to_pylist()
    assert "top_score" not in rows[0]
