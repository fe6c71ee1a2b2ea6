"""Files of questions that are refused by name and line, and what each kind of evaluation needs of a configuration."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.evals.adaptive import read_answered
from replug.evals.folder import EvaluationFolder
from replug.evals.internet_sets import InternetQuestion, gold_evidence, read_set
from replug.evals.kinds import KINDS, check_evaluation
from replug.evals.loop import Item
from replug.evals.mmlu import read_mmlu
from replug.evals.popqa import TEMPLATES, PopQuestion, plan_shots, question_of, read_popqa
from replug.evals.questions import read_questions
from tests.support.command_line import ROOT
from tests.support.outcome_folders import row, write_evaluation
from tests.support.preparing import write_jsonl

DEV = "Which is 1?,1,2,3,4,A\nWhich is 4?,1,2,3,4,D\n"
ANSWERED = {"question": "q", "answers": ["a"]}
PERSON = {"id": 1, "subj": "Ada", "prop": "occupation", "obj": "writer", "s_pop": 142, "possible_answers": ["writer"]}
HOTPOT = {"question": "Which?", "answer": "It", "supporting_facts": [["No", 0]], "context": [["A", ["It began."]]]}
CLAIM = {"id": 1, "label": "SUPPORTS", "claim": "So it is.", "evidence": [[[1, 2, "Page", 7]]]}
YES = {"qid": "q1", "question": "Do fish fly?", "answer": False, "facts": ["Fish swim."]}
DATED = {"id": 9, "edited_question": "who leads as of 2021", "date": "2021", "answer": ["Bo"]}
RIGHT = {"accuracy": 1.0, "popularity": 50.0}


def mmlu(test: str | None, num: int = 2, subject: str = "anatomy", dev: str | None = DEV) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        for split, content in (("test", test), ("dev", dev)):
            if content is not None:
                (folder / split).mkdir()
                (folder / split / f"{subject}_{split}.csv").write_text(content)
        return read_mmlu(folder, num)

    return read


def second(reader: Callable[[Path], object], *rows: dict[str, Any]) -> Callable[[Path], object]:
    """Read rows as JSON Lines; of several the last is wrong."""
    return lambda folder: reader(write_jsonl(folder / "q.jsonl", list(rows)))


def of_set(name: str, row: dict[str, Any]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "set.json").write_text(json.dumps([row]))
        return read_set(name, folder / "set.json")

    return read


def pool(num_relations: int, each: int) -> list[PopQuestion]:
    return [
        PopQuestion(Item(f"{of} {n}", question_of(of, f"s {n}"), of), ("x",), f"s {n}", "x", 10.0)
        for n in range(each)
        for of in list(TEMPLATES)[:num_relations]
    ]


def policy(*rows: dict[str, Any]) -> Callable[[Path], object]:
    return lambda folder: read_answered([EvaluationFolder(write_evaluation(folder / "one", list(rows)))])


def evidence(**of: Any) -> Callable[[Path], object]:
    question, empty = InternetQuestion(Item("a", "a?", "all"), ("x",), **of), SimpleNamespace(rows_of=lambda ids: {})
    return lambda folder: gold_evidence([question], empty, "methods: gold")


REFUSED = [
    (mmlu("Which?,1,2,3,A\n"), "test/anatomy_test.csv:1: expected a question, four choices and one of A, B, C, D"),
    (mmlu(DEV + '"Which?,1,2,3,4,A\n'), ":3: expected a question"),
    (mmlu(""), "holds no questions"),
    (mmlu(None, dev=None), "holds no MMLU"),
    (mmlu(DEV, num=5), "anatomy_dev.csv holds 2 questions, 5 demonstrations are asked for"),
    (mmlu(DEV, subject="alchemy"), "'alchemy' is not one of MMLU's 57 subjects"),
    (second(read_questions, ANSWERED, {"answers": ["a"]}), "q.jsonl:2: field 'question' must be a text, found None"),
    (second(read_questions, {**ANSWERED, "answers": ["a", ""]}), ":1: field 'answers' must be a list of texts"),
    (second(read_questions, {**ANSWERED, "gold": "p1"}), ":1: field 'gold' must be a list of document ids"),
    (second(read_questions, {**ANSWERED, "id": True}), "field 'id' must be a string or an integer, found True"),
    (second(read_questions, *[{**ANSWERED, "id": "same"}] * 2), ":2: id 'same' occurs twice"),
    (second(read_popqa, {**PERSON, "prop": "age"}), "q.jsonl:1: prop 'age' is unknown; expected one of occupation,"),
    (second(read_popqa, {**PERSON, "s_pop": -1}), "field 's_pop' must be a count, 0 or more, found -1"),
    (second(read_popqa, {**PERSON, "answers": ["x"]}), "or 'answers', found possible_answers and answers"),
    (lambda _: plan_shots(pool(1, 9), None, 5, 0), "shots of 'occupation' come equally from 0 others"),
    (lambda _: plan_shots(pool(4, 9), None, 2, 0), "questions.shots is 2, but shots of 'father' come equally from 3"),
    (lambda _: plan_shots(pool(2, 4), pool(2, 4)[:2], 4, 0), "asked for, but 3 of 4 questions are not evaluated"),
    (of_set("nq", {"question": "a"}), "row 1: expected the field 'answer' or 'answers', found neither"),
    (of_set("hotpotqa", HOTPOT), "row 1: its evidence is not as in the files of hotpotqa (KeyError: 'No')"),
    (of_set("fever", {**CLAIM, "label": "TRUE"}), "label 'TRUE' is unknown; expected one of SUPPORTS"),
    (of_set("fever", {**CLAIM, "evidence": [[1]]}), "its evidence is not as in the files of fever (TypeError:"),
    (of_set("strategyqa", {**YES, "answer": "yes"}), "field 'answer' must be true or false, found 'yes'"),
    (of_set("situatedqa", {**DATED, "date": "last week"}), "date 'last week' does not end with a year"),
    (evidence(), "question a has no gold evidence, which methods: gold needs"),
    (evidence(evidence_ids=("gone",)), "names the document gone as its gold evidence, which data.corpus"),
    (policy(*[row("a", "x", none=RIGHT)] * 50), "expected none, and a method with documents"),
    (policy(row("a", "x", none=RIGHT, bm25_at_1=RIGHT)), "one asked 1 questions"),
]


@pytest.mark.parametrize(("read", "message"), REFUSED)
def test_what_cannot_be_read_is_named(tmp_path: Path, read: Callable[[Path], object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read(tmp_path)


# Keys that a kind needs -----------------------------------------------------------------------------------------------

SHIPPED = {path.stem: path for path in (ROOT / "configs").glob("eval_*.yaml")}
GOOD = "evaluation: language_modelling\nout: x\nmethods: [none]\nlm: {path: stand_in}\ntexts: {path: stand_in}\n"
INTERNET = ["evaluation=internet_qa", "texts.path=null", "methods=[none]", "questions.path=x", "questions.dataset=nq"]
HELDOUT = ["texts.path=null", "data.prepared=x"]
MMLU = ["evaluation=mmlu", "questions.path=x"]


def checked(tmp_path: Path, *overrides: str) -> None:
    path = tmp_path / "evaluation.yaml"
    path.write_text(GOOD)
    check_evaluation(load_evaluation_config(path, overrides))


def given(path: Path) -> list[str]:
    """List what a shipped configuration leaves to its user: models, and a source, or questions and documents."""
    has_questions = "source:" not in path.read_text()
    own = ["questions.path=given", "data.corpus=given"] if has_questions else []
    own += ["data.source=given"] if "source: null" in path.read_text() else []
    return ["retriever.path=given", "lm.path=given", "out=given", *own]


def test_every_kind_has_a_configuration_under_its_name_that_lacks_models_questions_and_documents_only(tmp_path):
    configs = {name: load_evaluation_config(path, given(path)) for name, path in SHIPPED.items()}
    assert {config.evaluation for config in configs.values()} == set(KINDS)
    for config in configs.values():
        check_evaluation(config)
    checked(tmp_path)


RETRIEVAL = ["evaluation=retrieval", "questions.path=x", "data.corpus=x"]
KEYS = [
    (["evaluation=mmlu"], "questions.path is missing"),
    (["methods=[genread]"], "methods: genread answers questions, and evaluation=language_modelling asks"),
    ([*RETRIEVAL, "methods=[bm25]"], "bm25 ranks too few documents"),
    ([*RETRIEVAL, "methods=[bm25/posterior]", "k=20"], "bm25/posterior; weights change no ranking; expected bm25"),
    (["texts.path=null"], "texts.path is missing"),
    ([*HELDOUT, "texts.scored_tokens=64"], "texts.scored_tokens is set, but held-out texts are measured as they"),
    ([*MMLU, "methods=[bm25/posterior]", "data.corpus=x"], "bm25/posterior; an answer of mmlu is one letter"),
    ([*INTERNET, "questions.dataset=popqa"], "questions.dataset is popqa; evaluation=internet_qa expects one of nq"),
    ([*INTERNET, "methods=[poe@10]"], "data.corpus is missing; web.engine=local expects documents"),
    (["questions.dataset=nq"], "questions.dataset is set, but evaluation=language_modelling does not read it"),
    ([*INTERNET, "rerank_lm.path=a", "rerank_lm.url=b"], "rerank_lm.path and rerank_lm.url are both set"),
    (["ensemble.temperature=0"], "ensemble.temperature is 0"),
    (["rerank_lm.path=x"], "rerank_lm.path is set"),
    ([*MMLU, "ensemble.temperature=2"], "texts.path is set"),
    (["evaluation=perplexity"], "evaluation: 'perplexity' .*expected one of internet_qa, language_modelling, mmlu"),
]


@pytest.mark.parametrize(("overrides", "message"), KEYS)
def test_what_a_kind_needs_is_asked_for_by_its_key(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        checked(tmp_path, *overrides)
