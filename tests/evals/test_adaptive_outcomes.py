"""Outcomes on disk as arrays, what is refused of them, what policies cost, and the policy that is kept."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from replug.evals.adaptive.comparison import choose_pair, compare_policies, fit_policy, with_accuracy
from replug.evals.adaptive.outcomes import AnsweredQuestions, TwoWays, full_name, read_answered, retriever_identity
from replug.evals.adaptive.protocol import COUNTED, Prices, WayCosts, policy_costs
from replug.evals.adaptive.thresholds import fit_thresholds

from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.data.prepare.sets import import_corpus
from replug.evals.adaptive import comparison
from replug.evals.folder import EvaluationFolder
from replug.index_workers.version_store import VersionStore
from replug.models.policy import load_policy
from tests.support.index_versions import begin, publish, write_corpus
from tests.support.outcome_folders import counted_in_documents, made_up_rows, row, write_evaluation

NONE = {"accuracy": 1.0, "popularity": 50.0, "mean_logprob": -0.5, "lm_calls": 1, "retriever_calls": 0}
BM25 = {"accuracy": 0.0, "popularity": 50.0, "top_score": 3.0, "lm_calls": 1, "retriever_calls": 1}


def two_rows() -> list[dict]:
    return [
        row("a", "capital", none=NONE, bm25_at_1=BM25),
        row("b", "genre", none={**NONE, "accuracy": 0.0, "popularity": 7.0}, bm25_at_1={**BM25, "accuracy": 1.0}),
    ]


def only(folder, rows=None, **more) -> AnsweredQuestions:
    [answered] = read_answered([write_evaluation(folder, rows or two_rows(), **more)])
    return answered


# Reading ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_as_arrays_by_method(tmp_path):
    answered = only(tmp_path / "one", seconds={"none": 0.5})
    assert (answered.name, answered.identity) == ("tiny", "tiny:float32")
    assert answered.ids == ("a", "b") and answered.relations == ("capital", "genre")
    assert list(answered.methods) == ["none", "bm25@1"]
    assert answered.methods["none"].accuracy.tolist() == [1, 0]
    assert answered.methods["none"].seconds == {"seconds": 0.5, "evidence_seconds": 0.05}
    assert math.isnan(answered.methods["bm25@1"].costs().seconds)
    signals = answered.signals(TwoWays("none", "bm25@1"))
    assert {name: values.tolist() for name, values in signals.items()} == {
        "popularity": [50.0, 7.0],
        "mean_logprob": [-0.5, -0.5],
        "top_score": [3.0, 3.0],
    }


def test_folders_of_one_lm_bring_their_methods_together_by_the_questions_ids(tmp_path):
    first = write_evaluation(tmp_path / "one", [row("a", "x", none=NONE), row("b", "x", none=NONE)])
    moved = [row("b", "x", replug_at_1={**BM25, "accuracy": 1.0}), row("a", "x", replug_at_1=BM25)]
    second = write_evaluation(tmp_path / "two", moved)
    [answered] = read_answered([first, second])
    assert list(answered.methods) == ["none", "replug@1"]
    assert answered.methods["replug@1"].accuracy.tolist() == [0, 1]
    assert answered.methods["replug@1"].folder.path == second


def test_folders_of_other_lms_stand_beside_each_other(tmp_path):
    folders = [write_evaluation(tmp_path / lm, two_rows(), lm=lm) for lm in ("small", "large")]
    assert [answered.name for answered in read_answered(folders)] == ["small", "large"]


def change(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("outcomes.jsonl", '"accuracy": 1.0', '"accuracy": 0.5', r"outcomes\.jsonl:1: none: accuracy is 0\.5"),
        ("outcomes.jsonl", '"accuracy": 0.0, "popularity": 50.0, "t', '"t', r"bm25@1: accuracy is None"),
        ("outcomes.jsonl", '"id": "b"', '"id": "a"', r"outcomes\.jsonl:2: id 'a' occurs twice"),
        ("outcomes.jsonl", '"group": "genre"', '"group": null', r"outcomes\.jsonl:2: field 'group' is None"),
        ("outcomes.jsonl", '"numbers": {"accuracy": 1.0, "t', '"number": {"t', r":2: bm25@1: field 'numbers' is None"),
        ("outcomes.jsonl", '{"id": "b"', '{"id": "b', r"outcomes\.jsonl:2 is not valid JSON"),
        ("lm.json", '"tiny:float32"', "null", "asked no LM"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path, file, old, new, message):
    rows = two_rows()
    rows[1]["methods"]["bm25@1"]["numbers"].pop("popularity")
    folder = write_evaluation(tmp_path / "one", rows)
    change(folder / file, old, new)
    with pytest.raises(UserError, match=message):
        read_answered([folder])


def test_an_unfinished_evaluation_and_a_folder_that_is_none_are_refused(tmp_path):
    folder = write_evaluation(tmp_path / "one", two_rows())
    (folder / "results.json").unlink()
    with pytest.raises(UserError, match="no finished evaluation"):
        read_answered([folder])
    with pytest.raises(UserError, match="holds no evaluation"):
        read_answered([tmp_path])
    with pytest.raises(UserError, match="no folder is given"):
        read_answered([])


def test_other_questions_or_methods_and_other_answers_of_one_method_are_refused(tmp_path):
    first = write_evaluation(tmp_path / "one", two_rows())
    others = write_evaluation(tmp_path / "others", [{**two_rows()[0], "id": "c"}, two_rows()[1]], lm="large")
    with pytest.raises(UserError, match="other questions: only one of them holds a"):
        read_answered([first, others])
    flipped = two_rows()
    flipped[0]["methods"]["none"]["numbers"]["accuracy"] = 0.0
    with pytest.raises(UserError, match=r"none answers differently in .*two and in .*one"):
        read_answered([first, write_evaluation(tmp_path / "two", flipped)])
    fewer = [two_rows()[0], row("b", "genre", none=NONE)]
    with pytest.raises(UserError, match=r"outcomes\.jsonl:2: methods are none; expected none, bm25@1"):
        read_answered([write_evaluation(tmp_path / "fewer", fewer)])


def test_folders_of_one_lm_that_asked_in_other_ways_are_refused_by_the_key(tmp_path):
    first = write_evaluation(tmp_path / "one", two_rows())
    second = copied(first, tmp_path / "two")
    change(second / "config.yaml", "query: '{question}'", "query: 'Q: {question}'")
    with pytest.raises(UserError, match=r"questions\.query is \{question\} in .*one, but Q: \{question\} in .*two"):
        read_answered([first, second])
    third = copied(first, tmp_path / "three")
    change(third / "config.yaml", "max_questions: null", "max_questions: 2")
    assert len(read_answered([first, third])) == 1


def copied(folder, target):
    shutil.copytree(folder, target)
    return target


def test_documents_that_were_counted_are_no_page_views(tmp_path):
    answered, pair = only(tmp_path / "one", counted_in_documents(made_up_rows(30))), TwoWays("none", "replug@1")
    assert answered.popularity_signal == "frequency"
    assert "frequency" in answered.signals(pair) and "popularity" not in answered.signals(pair)
    with pytest.raises(UserError, match="hold no popularity; expected one of frequency, mean_logprob"):
        fit_policy(answered, pair, "popularity")


def with_frequency(rows: list[dict], frequency: float) -> list[dict]:
    for one in rows:
        for outcome in one["methods"].values():
            outcome["numbers"]["frequency"] = frequency
    return rows


def test_a_frequency_is_that_in_the_documents_that_are_searched(tmp_path):
    small = write_evaluation(tmp_path / "small", with_frequency([row("a", "x", none=NONE, bm25_at_1=BM25)], 1.0))
    large = write_evaluation(tmp_path / "large", with_frequency([row("a", "x", replug_at_1=BM25)], 7.0))
    [answered] = read_answered([small, large])
    assert answered.signals(TwoWays("none", "bm25@1"))["frequency"].tolist() == [1.0]
    assert answered.signals(TwoWays("none", "replug@1"))["frequency"].tolist() == [7.0]


def test_a_question_has_one_popularity_in_all_folders_of_an_lm(tmp_path):
    first = write_evaluation(tmp_path / "one", [row("a", "x", none=NONE), row("b", "x", none=NONE)])
    other = [row("b", "x", bm25_at_1={**BM25, "popularity": 7.0}), row("a", "x", bm25_at_1=BM25)]
    with pytest.raises(UserError, match=r"popularity of b is 50 in .*one, but 7 in .*two: expected the same questions"):
        read_answered([first, write_evaluation(tmp_path / "two", other)])


# Costs ------------------------------------------------------------------------------------------------------------


def way(**numbers: list[float]) -> dict[str, np.ndarray]:
    return {name: np.array(numbers.get(name, [0, 0, 0, 0]), dtype=float) for name in COUNTED}


CLOSED = WayCosts(way(lm_calls=[1, 1, 1, 1], prompt_tokens=[10, 20, 30, 40], generated_tokens=[2, 2, 2, 2]), 1.0, 0.0)
AUGMENTED = WayCosts(
    way(lm_calls=[2, 2, 2, 2], retriever_calls=[1, 1, 1, 1], prompt_tokens=[100, 200, 300, 400]), 5.0, 0.5
)
SPLITS = np.array([[True, True, False, False], [False, True, True, False]])
RETRIEVED = np.array([[False, False, True, False], [False, False, False, True]])


def test_a_policy_costs_what_each_question_costs_the_way_that_it_is_answered():
    costs = policy_costs(CLOSED, AUGMENTED, RETRIEVED, SPLITS, asks_first=False, searches=False)
    # Left to measure: questions 2 (retrieves) and 3; then 0 and 3 (retrieves).
    assert costs.prompt_tokens == ((300 + 40) / 2 + (10 + 400) / 2) / 2
    assert (costs.lm_calls, costs.retriever_calls, costs.seconds) == (1.5, 0.5, 3.0)
    assert costs.dollars(Prices(2.0, 4.0)) == pytest.approx(1000 * (187.5 * 2 + 1 * 4) / 1e6)


def test_a_signal_of_the_closed_book_answer_is_paid_for_by_who_retrieves_too():
    costs = policy_costs(CLOSED, AUGMENTED, RETRIEVED, SPLITS, asks_first=True, searches=False)
    assert costs.prompt_tokens == ((330 + 40) / 2 + (10 + 440) / 2) / 2
    assert (costs.lm_calls, costs.retriever_calls, costs.seconds) == (2.0, 0.5, 3.5)


def test_a_signal_of_the_search_searches_for_every_question():
    costs = policy_costs(CLOSED, AUGMENTED, RETRIEVED, SPLITS, asks_first=False, searches=True)
    assert (costs.lm_calls, costs.retriever_calls, costs.seconds) == (1.5, 1.0, 3.25)
    everything = policy_costs(CLOSED, AUGMENTED, ~SPLITS, SPLITS, asks_first=False, searches=True)
    assert everything.seconds == 5.0


# Comparing and fitting --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> AnsweredQuestions:
    return only(tmp_path_factory.mktemp("made up") / "one", made_up_rows(), seconds={"none": 0.2, "replug@1": 0.9})


PAIR = TwoWays("none", "replug@1")


def test_every_signal_is_compared_on_the_same_splits_between_never_and_the_oracle(made_up):
    compared = compare_policies(made_up, PAIR, num_resamples=50)
    names = ["popularity", "frequency", "mean_logprob", "mean_entropy", "top_score", "margin"]
    assert [one.name for one in compared] == ["never", "always", *(name for name in names for _ in range(2)), "oracle"]
    by = {(one.name, one.thresholds): one for one in compared}
    assert by["never", None].worth.share.value == 0 and by["always", None].worth.share.value == 1
    best = max(one.worth.accuracy.value for one in compared if one.signal)
    assert by["never", None].worth.accuracy.value < best < by["oracle", None].worth.accuracy.value
    assert by["mean_logprob", "one for all"].auroc.low > 0.7
    assert by["never", None].costs.prompt_tokens == 240 and by["oracle", None].costs is None
    share = by["mean_entropy", "one for all"].worth.share.value
    assert by["mean_entropy", "one for all"].costs.lm_calls == pytest.approx(1 + share)
    assert by["top_score", "one for all"].costs.retriever_calls == 1.0
    assert by["popularity", "by relation"].costs.retriever_calls == pytest.approx(
        by["popularity", "by relation"].worth.share.value
    )


def test_ways_are_chosen_by_name_and_guessed_only_where_there_are_two(made_up, tmp_path):
    assert choose_pair(only(tmp_path / "two")) == TwoWays("none", "bm25@1")
    assert choose_pair(made_up, None, "genread") == TwoWays("none", "genread")
    assert choose_pair(made_up, "bm25@1", "replug@1") == TwoWays("bm25@1", "replug@1")
    for given, message in (
        ((None, None), "--augmented is missing; expected one of bm25@1, replug@1, genread"),
        ((None, "replug"), "--augmented: no folder holds the method replug; expected one of none, bm25@1"),
        (("closed", "genread"), "--closed: no folder holds the method closed"),
        (("none", "none"), "both none"),
    ):
        with pytest.raises(UserError, match=message):
            choose_pair(made_up, *given)


def test_one_question_cannot_be_split(tmp_path):
    with pytest.raises(UserError, match="of one question"):
        compare_policies(only(tmp_path / "one", two_rows()[:1]), TwoWays("none", "bm25@1"), 10)


@pytest.mark.parametrize("signal", ["popularity", "mean_entropy"])
def test_the_policy_that_is_kept_has_the_thresholds_of_all_questions_in_the_signals_unit(
    made_up, tmp_path, signal, monkeypatch
):
    pair = TwoWays("none", "genread")
    monkeypatch.setattr(comparison, "retriever_identity", lambda method, config, folder: f"that of {method}")
    policy = fit_policy(made_up, pair, signal)
    with_accuracy(policy, compare_policies(made_up, pair, 10)).save(tmp_path / "policy.json")
    policy = load_policy(tmp_path / "policy.json")
    values, questions = made_up.signals(pair)[signal], made_up.questions(pair)
    sign = -1 if signal == "mean_entropy" else 1
    fitted = fit_thresholds(sign * values, made_up.relations, questions.closed, questions.augmented)
    words = {-math.inf: "never", math.inf: "always"}
    assert policy.thresholds == {name: words.get(value, sign * value) for name, value in fitted.by_relation.items()}
    assert policy.pooled == words.get(fitted.pooled, sign * fitted.pooled)
    assert (policy.lm, policy.retriever, policy.closed, policy.augmented) == (
        "tiny:float32", "that of genread", "none", "genread",
    )  # fmt: skip
    assert policy.fitted["questions"] == 300
    accuracy = policy.fitted["accuracy on questions left out"]
    assert list(accuracy) == ["never", "always", f"{signal} by relation", f"{signal} one for all", "oracle"]
    ours = [policy.retrieves(value, relation) for value, relation in zip(values, made_up.relations, strict=True)]
    limits = np.array([fitted.by_relation[relation] for relation in made_up.relations])
    assert ours == (sign * values < limits).tolist()
    json.loads((tmp_path / "policy.json").read_text(), parse_constant=pytest.fail)  # no Infinity, which is no JSON


def test_a_signal_that_the_outcomes_do_not_hold_is_refused_by_name(tmp_path):
    answered, pair = only(tmp_path / "one"), TwoWays("none", "bm25@1")
    with pytest.raises(UserError, match="hold no mean_entropy; expected one of popularity, mean_logprob, top_score"):
        fit_policy(answered, pair, "mean_entropy")


# Retrievers -------------------------------------------------------------------------------------------------------


def test_a_policy_for_a_retriever_whose_index_is_gone_is_not_written(made_up):
    with pytest.raises(UserError, match="the index of replug@1 is gone"):
        fit_policy(made_up, PAIR, "popularity")


def test_a_retriever_is_told_by_its_weights_and_documents(tmp_path):
    folder = EvaluationFolder(write_evaluation(tmp_path / "one", two_rows()))
    config = load_evaluation_config(folder.config)
    store = VersionStore(folder.found / "index" / "replug")
    write_corpus(store.root.parent / "data" / "documents")
    plan = begin(store)
    publish(store, plan)
    assert retriever_identity("replug@1", config, folder) == plan.retriever
    dpr = replace(config, query_encoders={"replug": "DPR"})
    assert retriever_identity("replug@1", dpr, folder) == f"{plan.retriever}:queries by DPR"
    other = (replace(plan, weights_sha256="x"), replace(plan, corpus_sha256="x"), replace(plan, similarity="dot"))
    assert len({plan.retriever, *(one.retriever for one in other)}) == 4


def test_what_needs_no_index_is_told_by_its_documents_or_by_its_name(tmp_path):
    folder = EvaluationFolder(write_evaluation(tmp_path / "one", two_rows()))
    config = load_evaluation_config(folder.config)
    with pytest.raises(UserError, match="the documents are gone"):
        retriever_identity("bm25@1", config, folder)
    (tmp_path / "corpus.jsonl").write_text('{"id": "d", "text": "some words"}\n')
    corpus = import_corpus(tmp_path / "corpus.jsonl", folder.data / "corpus")
    assert retriever_identity("bm25@1", config, folder) == f"bm25:{corpus.corpus_sha256[:16]}"
    assert retriever_identity("genread", config, folder) == "genread"


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("bm25/softmax", "bm25@7/softmax"),
        ("replug@3/concat", "replug@3/concat"),
        ("none", "none"),
    ],
)
def test_a_method_is_named_with_its_number_of_documents(method, name):
    assert full_name(method, 7) == name
