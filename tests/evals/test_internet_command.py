"""The public sets of questions: how rows are read, shown, measured and fitted on; and the command on stand-ins."""

import json
from pathlib import Path

import pyarrow.parquet as pq
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
from tests.support.cached_scores import num_cached
from tests.support.evaluating import evaluated, kill_at, num_lines, typed
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
LEADS = {"edited_question": "who leads as of January 27, 2021", "answer": ["Bo", "Bo"], "id": -79}
DATED = {**LEADS, "question": "who leads", "date": "January 27, 2021", "date_type": "start"}
PLACED = {
    "question": "who leads",
    "id": 5,
    "edited_question": "who leads in Peru",
    "location": "Peru",
    "answer": ["Cy"],
}


def read(dataset: str, folder: Path, *rows: dict):
    """Write the set as it is published: a JSON array, or JSON Lines."""
    if dataset not in ("hotpotqa", "strategyqa"):
        return read_set(dataset, write_jsonl(folder / "set.jsonl", rows))
    (folder / "set.json").write_text(json.dumps(rows))
    return read_set(dataset, folder / "set.json")


PASSAGES = [{"title": "T", "text": "first"}, {"title": "T", "text": "second"}]
PARAGRAPHS = ("It began in 1844. It ended.", "A title. It began in 1989.")
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
    ("situatedqa", {**DATED, "date": "December 4, 2020"}, {"group": NEW}),
    ("situatedqa", {**DATED, "date": "2021"}, {"group": NEW}),
    ("situatedqa", {**DATED, "date": "2021", "date_type": "sampled"}, {"group": OLD}),
    ("situatedqa", {**DATED, "date": "November 2020"}, {"group": OLD}),
    ("situatedqa", {**DATED, "date": "2020"}, {"group": OLD}),
]


@pytest.mark.parametrize(("dataset", "row", "expected"), ROWS)
def test_a_row_becomes_a_question_as_its_set_has_it(dataset, row, expected, tmp_path):
    [question] = read(dataset, tmp_path, row)
    found = {name: getattr(question if hasattr(question, name) else question.example, name) for name in expected}
    assert found == expected


def test_the_validation_part_is_chosen_by_the_questions_words_not_by_the_file(tmp_path):
    rows = [{"question": f"what is {n}?", "answer": [str(n)]} for n in range(100)]
    copies = [{**row, "id": f"other-{n}"} for n, row in enumerate(reversed(rows))]
    read_twice = [read("nq", tmp_path, *some) for some in (rows, copies)]
    chosen = [{one.example.query for one in some if is_validation(one)} for some in read_twice]
    assert chosen[0] == chosen[1] and len(chosen[0]) > 0


# Shots, the validation part and gold evidence ------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path) -> Path:
    """Forty questions, of which every second tells its evidence."""
    rows = [{"id": f"q{n}", "question": f"what is {n}?", "answers": [str(n)]} for n in range(40)]
    rows = [{**row, "gold_evidence": "e"} if n % 2 else row for n, row in enumerate(rows)]
    return write_jsonl(tmp_path / "nq.jsonl", rows)


def test_shots_have_evidence_and_are_never_measured(questions):
    config = QuestionsConfig(path=str(questions), dataset="nq")
    asked, shots = plan_questions(config, 0)
    assert (len(asked), len(shots)) == (25, 15) and all(shot.evidence for shot in shots)
    assert not {one.example.id for one in asked} & {one.example.id for one in shots}
    assert plan_questions(config, 0) == (asked, shots) and plan_questions(config, 1)[1] != shots


def test_situatedqas_shots_are_natural_questions_and_variants_are_on_one_side(questions, tmp_path):
    dated = [(n // 4, str(2018 + n % 4)) for n in range(400)]
    rows = [{"id": n, "edited_question": f"who leads {n} as of {y}", "date": y, "answer": ["x"]} for n, y in dated]
    path = write_jsonl(tmp_path / "temp.jsonl", rows)
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


# `replug evaluate` on stand-ins: the grid, a reranking LM, labels, and killed in the middle ---------------------------

GRID = ["none", "gold", "direct@1", "rag@1", "direct@3", "rag@3", "noisy_channel@3", "poe@2", "poe@3"]
SHOTS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Towns whose rivers are named in a document of each, which repeats the river, and in questions of two sets."""
    folder = tmp_path_factory.mktemp("internet")
    towns = [f"town{number}" for number in range(24)]
    texts = [f"{town} lies on the river{n % 5} river{n % 5}. The river{n % 5} is long." for n, town in enumerate(towns)]
    write_jsonl(folder / "corpus.jsonl", [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)])
    nq = [
        {"id": f"q{n}", "question": f"on which river lies {town}", "answer": [f"river{n % 5}"], "gold": [f"d{n}"]}
        for n, town in enumerate(towns)
    ]
    write_jsonl(folder / "nq.jsonl", nq)
    strategy = [
        {"qid": f"q{n}", "question": f"Is {town} on river1?", "answer": n % 5 == 1, "facts": [texts[n]]}
        for n, town in enumerate(towns[:8])
    ]
    (folder / "strategyqa.json").write_text(json.dumps(strategy))
    return folder


def asked(data: Path, out: Path, *overrides: str, dataset: str = "nq", file: str = "nq.jsonl") -> list[str]:
    questions = [f"questions.dataset={dataset}", f"questions.path={data / file}", f"questions.shots={SHOTS}"]
    documents = [f"data.corpus={data / 'corpus.jsonl'}", f"methods=[{','.join(GRID)}]", "web.num_results=4"]
    keys = [f"out={out}", *questions, "questions.max_new_tokens=2", *documents, "lm.path=stand_in"]
    return typed("internet", *keys, *overrides)


def test_the_whole_grid_is_measured_in_one_pass(data, tmp_path):
    out = tmp_path / "out"
    results, _ = evaluated(None, out, *asked(data, out))
    assert list(results) == GRID
    value = {name: {metric: entry["value"] for metric, entry in of.items()} for name, of in results.items()}
    rows = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert len(rows) == 24 - SHOTS
    questions = {one.example.id: one for one in read_set("nq", data / "nq.jsonl")}
    validation = [row["id"] for row in rows if is_validation(questions[row["id"]])]
    assert results["poe@3"]["exact_match"]["n"] == len(rows) - len(validation)
    assert results["poe@3"]["validation"]["n"] == len(validation)
    assert set(results["poe@3"]["validation"]["weights"]) > {"passage", "answer_given_question"}
    assert value["direct@1"]["retrieval_recall"] == 1.0 and value["direct@1"]["answer_in_evidence"] == 1.0
    assert value["direct@3"]["best_candidate"] >= value["direct@1"]["best_candidate"]
    assert "exact_match - direct@3" in results["poe@3"]
    examples = pq.read_table(out / "examples.parquet").to_pylist()
    assert len(examples) == (len(rows) - len(validation)) * len(GRID)
    assert {len(row["documents"]) for row in examples if row["method"] == "poe@2"} == {2}
    for row in examples:  # what was asked, what is right, and what could have been answered, best first
        assert row["prompt"].endswith(f"Question: {row['question']}\nAnswer:") and row["prompt"].count("Question") == 4
        assert row["references"] == list(questions[row["id"]].answers)
        assert row["answer"] == (row["candidates"] or [""])[0]
    assert "The validation part has" in (out / "table.md").read_text()
    again, printed = evaluated(None, out, *asked(data, out))
    assert again == results and "holds a finished evaluation" in printed


def test_another_lm_reranks_the_labels_that_the_first_one_scores(data, tmp_path):
    out = tmp_path / "out"
    settings = ["rerank_lm.path=stand_in", "methods=[none,gold,direct@2,poe@2]"]
    results, _ = evaluated(None, out, *asked(data, out, *settings, dataset="strategyqa", file="strategyqa.json"))
    assert results["poe@2"]["accuracy"]["n"] <= 8 - SHOTS and "copied" not in results["poe@2"]
    assert 0.5 <= results["poe@2"]["gold_overlap"]["value"] <= 1.0, "documents of other towns have half of the words"
    assert num_cached(out / "rerank_scores.sqlite").total() > 0 < num_cached(out / "scores.sqlite").total()
    assert "reranked by" in (out / "inputs.json").read_text()


@pytest.mark.slow
def test_killed_among_questions_it_goes_on_to_the_same_results(replug, data, tmp_path):
    settings = ["methods=[none,gold,direct@1,poe@3]", "rerank_lm.path=stand_in"]
    whole, _ = evaluated(replug, tmp_path / "whole", *asked(data, tmp_path / "whole", *settings))
    assert evaluated(None, tmp_path / "here", *asked(data, tmp_path / "here", *settings))[0] == whole, (
        "replicas that hold both LMs say what each says"
    )
    out = tmp_path / "killed"
    slow = [*settings, "lm.path=stand_in:0.05"]
    done = kill_at(3, lambda: num_lines(out / "outcomes.jsonl"), *asked(data, out, *slow))
    assert done < 24 - SHOTS, "it was not killed in the middle"
    killed_at = num_cached(out / "scores.sqlite")
    assert evaluated(None, out, *asked(data, out, *slow))[0] == whole
    assert num_cached(out / "scores.sqlite") == num_cached(tmp_path / "whole/scores.sqlite") > killed_at
    assert killed_at.total() > 0
