"""Open-domain questions put to a server that scores nothing: what is open is counted, never guessed."""

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.load import load_config, load_evaluation_config
from replug.config.methods import parse_methods
from replug.evals.evidence import Evidence
from replug.evals.kinds import check_evaluation
from replug.evals.loop import Example
from replug.evals.questions import OpenQuestion
from replug.evals.tasks.open_qa import OpenQa, open_answers
from replug.models.black_box_lm import UnsettledAnswer
from replug.models.generation import Generated
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT

QUESTIONS = [OpenQuestion(Example(name, f"who is {name}", "all"), ("Ada",)) for name in ("one", "two", "three")]
SERVER = ["lm.url=http://127.0.0.1:9/v1", "lm.model=words", "lm.api=answers", "lm.tokenizer=DIR"]
ASKED = ["questions.path=Q.jsonl", "data.corpus=D.jsonl", "retriever.path=DIR", *SERVER]


class Answers:
    """An LM that says these; an error is raised where it stands."""

    def __init__(self, answers: Sequence[str | Exception]) -> None:
        self._answers = list(answers)

    def submit_ensemble(self, *asked: object) -> "Future[Generated]":
        future: Future[Generated] = Future()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(Generated(answer, np.array([-0.1], dtype=np.float32), None, 1, None))
        return future


def task_of(answers: Sequence[str | Exception], may_stay_open: bool) -> OpenQa:
    lm: Any = Answers(answers)
    template = PromptTemplate("\n")
    return OpenQa(lm, template, QUESTIONS, [], {"replug": None}, 4, may_stay_open)


def outcomes_of(task: OpenQa) -> list[Any]:
    evidence = {"replug": Evidence((None,), np.zeros(1))}
    return [task.submit(row, evidence)()["replug"] for row in range(len(QUESTIONS))]


def test_an_answer_that_stays_open_is_wrong_at_least_and_right_at_most():
    task = task_of(["Ada", UnsettledAnswer("token 2 of the answer"), "Bob"], may_stay_open=True)
    found = outcomes_of(task)
    assert {"exact_match_at_most", "settled"} <= task.metrics.keys()
    assert [one.numbers["exact_match"] for one in found] == [1, 0, 0]
    assert [one.numbers["exact_match_at_most"] for one in found] == [1, 1, 0]
    assert [one.numbers["settled"] for one in found] == [1, 0, 1]
    assert found[1].detail["not_settled"] == "token 2 of the answer"


def test_of_an_lm_that_scores_there_are_no_bounds_and_an_error_ends_it():
    task = task_of(["Ada", UnsettledAnswer("token 2")], may_stay_open=False)
    assert "settled" not in task.metrics
    with pytest.raises(UnsettledAnswer):
        outcomes_of(task)


def test_open_answers_are_counted_by_method_below_the_table():
    methods = parse_methods(["replug", "none"], 2, {"replug": "DIR"})
    numbers = [{"replug": {"settled": 0.0}, "none": {"settled": 1.0}}, {"replug": {"settled": 1.0}, "none": {}}]
    rows = [{"methods": {name: {"numbers": of} for name, of in one.items()}} for one in numbers]
    finished: Any = SimpleNamespace(book=SimpleNamespace(methods=methods), rows=rows)
    text = open_answers(finished)
    assert text.startswith("\nreplug: 1 of 2 answers are not settled")
    assert "none" not in text


def test_open_questions_may_be_put_to_a_server_that_scores_nothing():
    check_evaluation(load_evaluation_config(ROOT / "configs/eval_open_qa.yaml", ASKED))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("mmlu", [], "lm.api is answers, a server that scores no text, and evaluation=mmlu asks for scores"),
        ("popqa", [], "and evaluation=popqa asks for scores"),
        ("lm", ["texts.path=T", "data.source=null"], "and evaluation=lm asks for scores"),
        ("open_qa", ["methods=[bm25@4/rerank]"], "and the method bm25@4/rerank asks for scores"),
        ("open_qa", ["ensemble.temperature=fit"], "and ensemble.temperature=fit asks for scores"),
        ("internet_nq", [], "and evaluation=internet_qa asks for scores"),
    ],
)
def test_what_asks_for_scores_is_refused_by_name(name: str, overrides: list[str], message: str):
    own = [] if name.startswith("internet") else ["retriever.path=DIR"]
    given = ["questions.path=Q.jsonl", "data.corpus=D.jsonl", *own, *SERVER, *overrides]
    with pytest.raises(UserError, match=message):
        check_evaluation(load_evaluation_config(ROOT / f"configs/eval_{name}.yaml", given))


def test_training_and_scoring_are_refused_by_name():
    with pytest.raises(UserError, match=r"and training learns from scores; expected lm\.api=echo"):
        load_config(ROOT / "configs/own_data.yaml", ["data.prepared=SET", "retriever.path=DIR", *SERVER])
    internet = ["rerank_lm.url=http://127.0.0.1:9/v1", "rerank_lm.model=m", "rerank_lm.api=answers"]
    given = ["questions.path=Q", "data.corpus=D", "lm.path=DIR", *internet, "rerank_lm.tokenizer=DIR"]
    with pytest.raises(UserError, match=r"rerank_lm\.api is answers, .* reranking asks for scores"):
        check_evaluation(load_evaluation_config(ROOT / "configs/eval_internet_nq.yaml", given))
