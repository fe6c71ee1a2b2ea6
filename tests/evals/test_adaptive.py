"""Outcomes on disk as arrays, what is refused of them, what policies cost, and the thresholds that are reported."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replug.config.errors import UserError
from replug.evals.adaptive import (
    COUNTED,
    AnsweredQuestions,
    compare_policies,
    costs_of,
    oriented,
    policy_costs,
    read_answered,
    thresholds_of,
)
from replug.evals.adaptive_report import example_blocks, figures_of_all, measure_lm, measure_pair
from replug.evals.charts import to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.tables import Table
from replug.evals.thresholds import fit_thresholds, rule_by
from tests.support.outcome_folders import RELATIONS, made_up_rows, row, write_evaluation

NONE = {"accuracy": 1.0, "popularity": 50.0, "mean_logprob": -0.5, "lm_calls": 1, "retriever_calls": 0}
BM25 = {"accuracy": 0.0, "popularity": 50.0, "top_score": 3.0, "lm_calls": 1, "retriever_calls": 1}
RARE = {"popularity": 7.0}
PAIR = ("none", "replug@1")


def two_rows() -> list[dict]:
    return [
        row("a", "capital", none=NONE, bm25_at_1=BM25),
        row("b", "genre", none={**NONE, **RARE, "accuracy": 0.0}, bm25_at_1={**BM25, **RARE, "accuracy": 1.0}),
    ]


def read(*folders) -> list[AnsweredQuestions]:
    return read_answered([EvaluationFolder(folder) for folder in folders])


# Reading ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_as_arrays_by_method(tmp_path):
    [answered] = read(write_evaluation(tmp_path / "one", two_rows()))
    assert (answered.name, answered.identity) == ("tiny", "tiny:float32")
    assert answered.ids == ("a", "b") and answered.relations == ("capital", "genre")
    assert list(answered.methods) == ["none", "bm25@1"]
    assert answered.right(("none", "bm25@1"))[0].tolist() == [1, 0]
    assert all(math.isnan(value) for value in costs_of(answered.methods["none"])["prompt_tokens"])
    signals = answered.signals(("none", "bm25@1"))
    assert {name: values.tolist() for name, values in signals.items()} == {
        "popularity": [50.0, 7.0],
        "mean_logprob": [-0.5, -0.5],
        "top_score": [3.0, 3.0],
    }


def test_folders_of_one_lm_bring_their_methods_together_by_the_questions_ids(tmp_path):
    first = write_evaluation(tmp_path / "one", [row("a", "x", none=NONE), row("b", "x", none=NONE)])
    moved = [row("b", "x", replug_at_1={**BM25, "accuracy": 1.0}), row("a", "x", replug_at_1=BM25)]
    second = write_evaluation(tmp_path / "two", moved)
    other = write_evaluation(tmp_path / "three", [{**one, "methods": two_rows()[0]["methods"]} for one in moved], "big")
    answered, beside = read(first, second, other)
    assert list(answered.methods) == ["none", "replug@1"] and beside.name == "big"
    assert answered.right(PAIR)[1].tolist() == [0, 1]
    assert answered.folders["replug@1"].path == second


def change(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path.parent


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("outcomes.jsonl", '"accuracy": 0.0, "popularity": 7', '"accuracy": 1.0, "popularity": 7', "none .*one and in"),
        ("config.yaml", "query: '{question}'", "query: 'Q: {question}'", r"questions\.query"),
    ],
)
def test_folders_of_one_lm_that_asked_or_answered_differently_are_refused(tmp_path, file, old, new, message):
    first, second = (write_evaluation(tmp_path / name, two_rows()) for name in ("one", "two"))
    assert len(read(first, change(second / "config.yaml", "max_questions: null", "max_questions: 2"))) == 1
    with pytest.raises(UserError, match=message):
        read(first, change(second / file, old, new))


def test_outcomes_that_no_policy_can_be_fitted_to_are_refused(tmp_path):
    with pytest.raises(UserError, match="tiny"):
        read(write_evaluation(tmp_path / "alone", [row("a", "x", none=NONE), row("b", "x", none=NONE)]))
    with pytest.raises(UserError, match="one asked one question"):
        read(write_evaluation(tmp_path / "one", two_rows()[:1]))


# Costs ------------------------------------------------------------------------------------------------------------


def costs(**numbers: list[float]) -> dict[str, np.ndarray]:
    known = {name: np.array(numbers.get(name, [0, 0, 0, 0]), dtype=float) for name in COUNTED}
    return dict(costs_of({"accuracy": np.zeros(4), **known}, (2.0, 4.0)))


CLOSED = costs(lm_calls=[1, 1, 1, 1], prompt_tokens=[10, 20, 30, 40], generated_tokens=[2, 2, 2, 2])
AUGMENTED = costs(lm_calls=[2] * 4, retriever_calls=[1] * 4, prompt_tokens=[100, 200, 300, 400])
SPLITS = np.array([[True, True, False, False], [False, True, True, False]])
RETRIEVED = np.array([[False, False, True, False], [False, False, False, True]])


@pytest.mark.parametrize(
    ("signal", "prompt_tokens", "others"),
    [  # Left to measure: questions 2 (retrieves) and 3; then 0 and 3 (retrieves).
        ("popularity", ((300 + 40) / 2 + (10 + 400) / 2) / 2, (1.5, 0.5)),
        ("mean_entropy", ((330 + 40) / 2 + (10 + 440) / 2) / 2, (2.0, 0.5)),
        ("top_score", ((300 + 40) / 2 + (10 + 400) / 2) / 2, (1.5, 1.0)),
    ],
)
def test_a_policy_costs_what_its_questions_cost_and_what_its_signal_is_known_from(signal, prompt_tokens, others):
    of = policy_costs(CLOSED, AUGMENTED, signal, RETRIEVED, SPLITS)
    assert of["prompt_tokens"] == prompt_tokens
    assert (of["lm_calls"], of["retriever_calls"]) == others


def test_dollars_are_for_a_thousand_questions_by_tokens_read_and_written():
    of = policy_costs(CLOSED, AUGMENTED, "popularity", RETRIEVED, SPLITS)
    assert of["dollars"] == pytest.approx(1000 * (187.5 * 2 + 1 * 4) / 1e6)


# Comparing and fitting --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> AnsweredQuestions:
    root = tmp_path_factory.mktemp("made up")
    return read(write_evaluation(root / "one", made_up_rows()))[0]


def test_every_signal_is_compared_on_the_same_splits_between_never_and_the_oracle(made_up):
    compared, better = compare_policies(made_up, PAIR, num_resamples=50)
    names = ["popularity", "frequency", "mean_logprob", "mean_entropy", "top_score"]
    assert [one.name for one in compared] == ["never", "always", *(name for name in names for _ in "ab"), "oracle"]
    by = {(one.name, one.thresholds): one for one in compared}
    assert by["never", None].worth.share.value == 0 and by["always", None].worth.share.value == 1
    best = max(one.worth.accuracy.value for one in compared if one.thresholds)
    assert by[better, None].worth.accuracy.value < best < by["oracle", None].worth.accuracy.value
    assert by["mean_logprob", "one for all"].auroc.low > 0.7
    assert by["never", None].costs["prompt_tokens"] == 240 and by["oracle", None].costs is None
    share = by["mean_entropy", "one for all"].worth.share.value
    assert by["mean_entropy", "one for all"].costs["lm_calls"] == pytest.approx(1 + share)
    assert by["top_score", "one for all"].costs["retriever_calls"] == 1.0
    assert by["popularity", "by relation"].costs["retriever_calls"] == pytest.approx(
        by["popularity", "by relation"].worth.share.value
    )


def test_genread_is_also_the_method_without_retrieval(made_up):
    assert made_up.pairs() == [
        *(("none", method) for method in ("bm25@1", "replug@1", "genread")),
        *(("genread", method) for method in ("bm25@1", "replug@1")),
    ]


@pytest.mark.parametrize("signal", ["popularity", "mean_entropy"])
def test_reported_thresholds_are_those_of_all_questions_in_the_signals_unit(made_up, signal):
    thresholds = thresholds_of(made_up, PAIR, signal)
    values, right, sign = made_up.signals(PAIR)[signal], made_up.right(PAIR), -1 if signal == "mean_entropy" else 1
    fitted = fit_thresholds(rule_by(oriented(signal, values), made_up.relations), *right)
    [fitted["others"]] = fit_thresholds(rule_by(oriented(signal, values)), *right).values()
    words = {-math.inf: "never", math.inf: "always"}
    assert thresholds == {name: words.get(value, sign * value) for name, value in fitted.items()}
    assert thresholds.keys() == {*RELATIONS, "others"}
    json.dumps(thresholds, allow_nan=False)


# The page ---------------------------------------------------------------------------------------------------------


def test_several_lms_are_drawn_by_relation_and_by_size_where_that_is_known(tmp_path):
    rows = {name: made_up_rows(200, knows) for name, knows in (("gpt2", 0.3), ("gpt2-xl", 0.8))}
    answered = read(*(write_evaluation(tmp_path / name, of, name) for name, of in rows.items()))
    measured = {one.name: measure_lm(one) for one in answered}
    drawn = {name: to_svg(draw, 7.0, height) for name, draw, height, _ in figures_of_all(measured, "popularity")}
    assert list(drawn) == ["accuracy", "relations", "sizes"]
    assert all(drawn["relations"].count(f">{name}<") == 1 for name in (*RELATIONS, "gpt2", "gpt2-xl"))
    assert ">124<" in drawn["sizes"] and ">1,557<" in drawn["sizes"] and "10,000 to 100,000" in drawn["sizes"]
    unknown = {**measured, "gpt2-xl": {**measured["gpt2-xl"], "parameters": None}}
    assert "sizes" not in [name for name, *_ in figures_of_all(unknown, "popularity")]


def test_bins_of_popularity_hold_every_question_once(made_up):
    right = made_up.right(PAIR)
    for bins in (measure_lm(made_up)["popularity"], measure_pair(made_up, PAIR, 10)["popularity"]):
        assert sum(of["n"] for of in bins) == 300
        for name, own in zip(PAIR, right, strict=True):
            assert sum(of["n"] * of["accuracy"][name].value for of in bins) == pytest.approx(own.sum())


def test_questions_that_documents_help_and_harm_are_shown_with_both_answers(tmp_path):
    folder = write_evaluation(tmp_path / "one", two_rows())
    rows = [
        {"id": name, "method": method, "question": "Where?", "references": ["Rome"], "answer": f"{name} of {method}"}
        for name in "ab"
        for method in ("none", "bm25@1")
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "examples.parquet")
    harmed, harms, helped, helps = example_blocks(read(folder)[0], ("none", "bm25@1"))
    assert isinstance(harms, Table) and isinstance(helps, Table)
    assert "bm25@1 harms 1" in harmed and "bm25@1 helps 1" in helped
    assert harms.rows == [["a", "Where? (Rome)", "a of none", "a of bm25@1"]]
    assert helps.rows == [["b", "Where? (Rome)", "b of none", "b of bm25@1"]]
