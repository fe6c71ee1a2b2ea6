"""Outcomes on disk as arrays, what is refused of them, what policies cost, and the policy that is kept."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.config.schema import EnsembleConfig, RetrieverConfig
from replug.data.prepare.sets import import_corpus
from replug.evals.adaptive import (
    COUNTED,
    AnsweredQuestions,
    MethodOutcomes,
    compare_policies,
    fit_policy,
    full_name,
    oriented,
    policy_costs,
    read_answered,
    retriever_identity,
    with_dollars,
)
from replug.evals.adaptive_figures import figures_by_popularity
from replug.evals.adaptive_report import _measure_lm
from replug.evals.charts import to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.thresholds import fit_thresholds, rule_by
from replug.index_workers.version_store import VersionStore
from replug.models.ensemble import REPLUG_WEIGHTS, Weighting
from replug.models.policy import load_policy
from tests.support.index_versions import begin, publish, write_corpus
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
    [answered] = read(write_evaluation(tmp_path / "one", two_rows(), seconds={"none": 0.5}))
    assert (answered.name, answered.identity) == ("tiny", "tiny:float32")
    assert answered.ids == ("a", "b") and answered.relations == ("capital", "genre")
    assert list(answered.methods) == ["none", "bm25@1"]
    assert answered.methods["none"].accuracy.tolist() == [1, 0]
    assert answered.methods["none"].costs["seconds"].tolist() == [0.5, 0.5]
    assert answered.methods["none"].search_costs["seconds"].tolist() == [0.05, 0.05]
    assert math.isnan(answered.methods["bm25@1"].mean_costs()["seconds"])
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
    assert answered.methods["replug@1"].accuracy.tolist() == [0, 1]
    assert answered.methods["replug@1"].folder.path == second


def change(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path.parent


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("outcomes.jsonl", '"accuracy": 0.0, "popularity": 7', '"accuracy": 1.0, "popularity": 7', "answers different"),
        (
            "config.yaml",
            "query: '{question}'",
            "query: 'Q: {question}'",
            r"questions\.query is \{question\} in .*one, ",
        ),
    ],
)
def test_folders_of_one_lm_that_asked_or_answered_differently_are_refused(tmp_path, file, old, new, message):
    first, second = (write_evaluation(tmp_path / name, two_rows()) for name in ("one", "two"))
    assert len(read(first, change(second / "config.yaml", "max_questions: null", "max_questions: 2"))) == 1
    with pytest.raises(UserError, match=message):
        read(first, change(second / file, old, new))


def test_outcomes_that_no_policy_can_be_fitted_to_are_refused(tmp_path):
    with pytest.raises(UserError, match="expected none, and a method with documents"):
        read(write_evaluation(tmp_path / "alone", [row("a", "x", none=NONE), row("b", "x", none=NONE)]))
    with pytest.raises(UserError, match="asked one question; expected two or more"):
        read(write_evaluation(tmp_path / "one", two_rows()[:1]))


# Costs ------------------------------------------------------------------------------------------------------------


def method(seconds: float, search_seconds: float, **numbers: list[float]) -> MethodOutcomes:
    costs = {name: np.array(numbers.get(name, [0, 0, 0, 0]), dtype=float) for name in COUNTED}
    search = {"retriever_calls": costs["retriever_calls"], "seconds": np.full(4, search_seconds)}
    return MethodOutcomes({}, {**costs, "seconds": np.full(4, seconds)}, search, None, None)


CLOSED = method(1.0, 0.0, lm_calls=[1, 1, 1, 1], prompt_tokens=[10, 20, 30, 40], generated_tokens=[2, 2, 2, 2])
AUGMENTED = method(5.0, 0.5, lm_calls=[2] * 4, retriever_calls=[1] * 4, prompt_tokens=[100, 200, 300, 400])
SPLITS = np.array([[True, True, False, False], [False, True, True, False]])
RETRIEVED = np.array([[False, False, True, False], [False, False, False, True]])


@pytest.mark.parametrize(
    ("signal", "prompt_tokens", "others"),
    [  # Left to measure: questions 2 (retrieves) and 3; then 0 and 3 (retrieves).
        ("popularity", ((300 + 40) / 2 + (10 + 400) / 2) / 2, (1.5, 0.5, 3.0)),
        ("mean_entropy", ((330 + 40) / 2 + (10 + 440) / 2) / 2, (2.0, 0.5, 3.5)),
        ("top_score", ((300 + 40) / 2 + (10 + 400) / 2) / 2, (1.5, 1.0, 3.25)),
    ],
)
def test_a_policy_costs_what_its_questions_cost_and_what_its_signal_is_known_from(signal, prompt_tokens, others):
    costs = policy_costs(CLOSED, AUGMENTED, signal, RETRIEVED, SPLITS)
    assert costs["prompt_tokens"] == prompt_tokens
    assert (costs["lm_calls"], costs["retriever_calls"], costs["seconds"]) == others


def test_dollars_are_for_a_thousand_questions_by_tokens_read_and_written():
    costs = policy_costs(CLOSED, AUGMENTED, "popularity", RETRIEVED, SPLITS)
    assert with_dollars(costs, (2.0, 4.0))["dollars"] == pytest.approx(1000 * (187.5 * 2 + 1 * 4) / 1e6)


# Comparing and fitting --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> AnsweredQuestions:
    root = tmp_path_factory.mktemp("made up")
    return read(write_evaluation(root / "one", made_up_rows(), seconds={"none": 0.2, "replug@1": 0.9}))[0]


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


def test_a_policy_says_how_its_documents_are_weighed(tmp_path):
    rows = made_up_rows(9)
    for one in rows:
        one["methods"]["replug@3/posterior"] = one["methods"]["replug@1"]
    folder = write_evaluation(tmp_path / "out", rows, ensemble=EnsembleConfig(share=0.2, alone=0.1))
    [answered] = read_answered([EvaluationFolder(folder)])
    for method, weighting in (("replug@3/posterior", Weighting(0.2, 0.1, read=64)), ("replug@1", REPLUG_WEIGHTS)):
        policy = fit_policy(answered, ("none", method), "popularity", "some:retriever", [])
        assert (policy.augmented, policy.weighting) == (method, weighting)


@pytest.mark.parametrize("signal", ["popularity", "mean_entropy"])
def test_the_policy_that_is_kept_has_the_thresholds_of_all_questions_in_the_signals_unit(made_up, tmp_path, signal):
    pair = ("none", "genread")
    fit_policy(made_up, pair, signal, "some:retriever", compare_policies(made_up, pair, 10)[0]).save(
        tmp_path / "p.json"
    )
    policy = load_policy(tmp_path / "p.json")
    values, right, sign = made_up.signals(pair)[signal], made_up.right(pair), -1 if signal == "mean_entropy" else 1
    fitted = fit_thresholds(rule_by(oriented(signal, values), made_up.relations), *right)
    words = {-math.inf: "never", math.inf: "always"}
    assert policy.thresholds == {name: words.get(value, sign * value) for name, value in fitted.items()}
    [pooled] = fit_thresholds(rule_by(oriented(signal, values)), *right).values()
    assert policy.pooled == words.get(pooled, sign * pooled)
    named = (policy.lm, policy.retriever, policy.closed, policy.augmented)
    assert named == ("tiny:float32", "some:retriever", "none", "genread")
    assert policy.fitted["questions"] == 300
    accuracy = policy.fitted["accuracy on questions left out"]
    assert list(accuracy) == ["never", "always", f"{signal} by relation", f"{signal} one for all", "oracle"]
    ours = [policy.retrieves(value, relation) for value, relation in zip(values, made_up.relations, strict=True)]
    limits = np.array([fitted[relation] for relation in made_up.relations])
    assert ours == (sign * values < limits).tolist()
    json.loads((tmp_path / "p.json").read_text(), parse_constant=pytest.fail)  # no Infinity, which JSON lacks


# Figures ----------------------------------------------------------------------------------------------------------


def test_several_lms_are_drawn_by_relation_and_by_size_where_that_is_known(tmp_path):
    rows = {name: made_up_rows(200, knows) for name, knows in (("gpt2", 0.3), ("gpt2-xl", 0.8))}
    answered = read(*(write_evaluation(tmp_path / name, of, name) for name, of in rows.items()))
    [first, second] = (_measure_lm(one, None) for one in answered)
    measured = {"gpt2": first, "gpt2-xl": second}
    drawn = {name: to_svg(draw, 7.0, height) for name, draw, height, _ in figures_by_popularity(measured, "popularity")}
    assert list(drawn) == ["subjects", "popularity_by_relation", "sizes"]
    shown = drawn["popularity_by_relation"]
    assert [shown.count(f">{name}<") for name in (*RELATIONS, "gpt2", "gpt2-xl")] == [1] * 7, "one legend"
    assert ">124<" in drawn["sizes"] and ">1,557<" in drawn["sizes"] and "10,000 to 100,000" in drawn["sizes"]
    for bins in (first["powers of popularity"], first["popularity"]):
        right = sum(of["n"] * of["accuracy"]["none"].value for of in bins)
        assert sum(of["n"] for of in bins) == 200 and right == pytest.approx(answered[0].right(PAIR)[0].sum())
    unknown = {"gpt2": first, "other": {**second, "parameters": None}}
    assert "sizes" not in [name for name, *_ in figures_by_popularity(unknown, "popularity")]


# Retrievers -------------------------------------------------------------------------------------------------------


def test_a_retriever_is_known_by_its_weights_and_documents(tmp_path):
    folder = EvaluationFolder(write_evaluation(tmp_path / "one", two_rows()))
    config = load_evaluation_config(folder.config)
    with pytest.raises(UserError, match="the index of replug@1 is gone"):
        retriever_identity("replug@1", config, folder)
    store = VersionStore(folder.found / "index" / "replug")
    write_corpus(store.root.parent / "data" / "documents")
    plan = begin(store)
    publish(store, plan)
    assert retriever_identity("replug@1", config, folder) == plan.retriever
    dpr = replace(config, query_encoders={"replug": "DPR"})
    assert retriever_identity("replug@1", dpr, folder) == f"{plan.retriever}:queries by DPR"
    other = (replace(plan, weights_sha256="x"), replace(plan, corpus_sha256="x"), replace(plan, similarity="dot"))
    assert len({plan.retriever, *(one.retriever for one in other)}) == 4


def test_what_needs_no_index_is_known_by_its_documents_or_by_its_name(tmp_path):
    folder = EvaluationFolder(write_evaluation(tmp_path / "one", two_rows()))
    config = load_evaluation_config(folder.config)
    with pytest.raises(UserError, match="the documents are gone"):
        retriever_identity("bm25@1", config, folder)
    (tmp_path / "corpus.jsonl").write_text('{"id": "d", "text": "some words"}\n')
    corpus = import_corpus(tmp_path / "corpus.jsonl", folder.data / "corpus")
    assert retriever_identity("bm25@1", config, folder) == f"bm25:{corpus.corpus_sha256[:16]}"
    assert retriever_identity("genread", config, folder) == "genread"


def test_a_policy_names_its_methods_in_full():
    config = EvaluationConfig(k=10, retriever=RetrieverConfig(path="stand_in"), retrievers={"lsr": "x"})
    names = {"untuned": "replug@10", "tuned@3/posterior": "lsr@3/posterior", "genread@1": "genread", "none": "none"}
    assert {name: full_name(name, config) for name in (*names, "bm25@1")} == {**names, "bm25@1": "bm25@1"}
