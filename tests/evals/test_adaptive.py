"""Policies of when to retrieve: outcomes on disk, costs, the page, and thresholds against brute force."""

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.config.errors import UserError
from replug.evals.adaptive import (
    COUNTED,
    AnsweredQuestions,
    compare_policies,
    costs_of,
    figures_of_all,
    measure_lm,
    measure_pair,
    oriented,
    policy_costs,
    read_answered,
    thresholds_of,
)
from replug.evals.charts import to_svg
from replug.evals.folder import EvaluationFolder
from replug.evals.thresholds import (
    ALWAYS,
    ALWAYS_RETRIEVE,
    NEVER,
    NEVER_RETRIEVE,
    ORACLE,
    accuracy_left_out,
    auroc,
    decisions,
    draw_splits,
    fit_thresholds,
    mean_over_splits,
    measure,
    refit,
    rule_by,
    signal_auroc,
)
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
    return dict(costs_of({"accuracy": np.zeros(4), **known}))


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


# Comparing and fitting --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> AnsweredQuestions:
    root = tmp_path_factory.mktemp("made up")
    return read(write_evaluation(root / "one", made_up_rows()))[0]


def test_every_signal_is_compared_on_the_same_splits_between_never_and_the_oracle(made_up):
    compared, better = compare_policies(made_up, PAIR, num_resamples=50)
    names = ["popularity", "mean_logprob", "mean_entropy", "top_score"]
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
    drawn = {name: to_svg(draw, 7.0, height) for name, draw, height, _ in figures_of_all(measured)}
    assert list(drawn) == ["accuracy", "relations", "sizes"]
    assert all(drawn["relations"].count(f">{name}<") == 1 for name in (*RELATIONS, "gpt2", "gpt2-xl"))
    assert ">124<" in drawn["sizes"] and ">1,557<" in drawn["sizes"] and "10,000 to 100,000" in drawn["sizes"]
    unknown = {**measured, "gpt2-xl": {**measured["gpt2-xl"], "parameters": None}}
    assert "sizes" not in [name for name, *_ in figures_of_all(unknown)]


def test_bins_of_popularity_hold_every_question_once(made_up):
    right = made_up.right(PAIR)
    for bins in (measure_lm(made_up)["popularity"], measure_pair(made_up, PAIR, 10)["popularity"]):
        assert sum(of["n"] for of in bins) == 300
        for name, own in zip(PAIR, right, strict=True):
            assert sum(of["n"] * of["accuracy"][name].value for of in bins) == pytest.approx(own.sum())


# Fitted thresholds, against brute force -------------------------------------------------------------------------------


# Few different values, so that many are equal; an unknown one is -inf.
VALUES = st.sampled_from([-math.inf, 0.0, 1.0, 2.0, 3.5, 1000.0])
QUESTION = st.tuples(VALUES, st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 1))


def columns(rows: Sequence[tuple]) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    values, relations, closed, augmented = zip(*rows, strict=True)
    return np.array(values), list(relations), np.array(closed), np.array(augmented)


def brute_force(values: Sequence[float], closed: Sequence[int], augmented: Sequence[int]) -> float:
    """Every candidate in turn, the lowest first; the first that no other surpasses."""
    rights = {}
    for threshold in [NEVER, *sorted(set(values)), ALWAYS]:
        each = zip(values, closed, augmented, strict=True)
        rights[threshold] = sum(a if value < threshold else c for value, c, a in each)
    return next(threshold for threshold, right in rights.items() if right == max(rights.values()))


@given(st.lists(QUESTION, min_size=1, max_size=12))
def test_thresholds_are_those_of_brute_force_with_ties_and_unknown_values(rows):
    values, relations, closed, augmented = columns(rows)
    fitted = fit_thresholds(rule_by(values, relations, 1), closed, augmented)
    assert fitted.keys() == set(relations)
    for relation, threshold in fitted.items():
        own = np.array(relations) == relation
        assert threshold == brute_force(values[own], closed[own], augmented[own])
    assert fit_thresholds(rule_by(values, min_questions=1), closed, augmented) == {
        "": brute_force(values, closed, augmented)
    }


def test_few_questions_have_no_threshold_of_their_own():
    """Unpopular entities need documents, but in the small relation it is the other way round: chance, of so few."""
    values, relations = np.array([*range(6), 0, 5]), [*"aaaaaa", *"bb"]
    closed, augmented = np.array([0, 0, 0, 1, 1, 1, 1, 0]), np.array([1, 1, 1, 0, 0, 0, 0, 1])
    rule = rule_by(values, relations, 6)
    assert fit_thresholds(rule, closed, augmented) == {"a": 3.0}, "b has the threshold of all questions"
    splits = np.array([[True] * 6 + [False] * 2])
    assert decisions(rule, closed, augmented, splits).tolist() == [[False] * 6 + [True, False]]
    assert fit_thresholds(rule_by(values, min_questions=8), closed, augmented) == {"": 3.0}
    assert fit_thresholds(rule_by(values, min_questions=9), closed, augmented) == {"": NEVER}, "always gains nothing"
    assert fit_thresholds(rule_by(values, min_questions=9), 0 * closed, augmented) == {"": ALWAYS}


# Splits -----------------------------------------------------------------------------------------------------------


def questions(num: int, seed: int = 0) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    """Popularities, some of them equal, relations, and right answers: the LM knows what is popular."""
    rng = np.random.default_rng(seed)
    popularity = np.round(10 ** rng.uniform(1, 5, num), -1)
    knows = rng.random(num) < (np.log10(popularity) - 1) / 4
    finds = rng.random(num) < 0.5
    return popularity, rng.choice(list("abcd"), num).tolist(), knows.astype(int), finds.astype(int)


def test_the_answers_of_the_test_part_change_no_decision():
    popularity, relations, *right = questions(200)
    rule, rng = rule_by(popularity, relations), np.random.default_rng(5)
    for split in draw_splits(200, 10):
        changed = [np.where(split, one, rng.permutation(1 - one)) for one in right]
        assert (decisions(rule, *changed, split[None]) == decisions(rule, *right, split[None])).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(QUESTION, min_size=3, max_size=14), st.integers(0, 1000), st.booleans())
def test_refitting_all_resamples_at_once_is_refitting_one_at_a_time(rows, seed, by_relation):
    values, relations, closed, augmented = columns(rows)
    groups = np.array(relations if by_relation else ["all"] * len(rows))
    splits = draw_splits(len(rows), 4, seed)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(rows), [1 / len(rows)] * len(rows), size=5).astype(float)
    # A resample that lies wholly on one side of a split leaves nothing to fit to or to measure.
    sides = [(counts @ side.T).min(axis=1) > 0 for side in (splits, ~splits)]
    counts = counts[sides[0] & sides[1]]
    found = refit(rule_by(values, groups.tolist(), 1), closed, augmented, splits, counts)
    for place, drawn in enumerate(counts.astype(int)):
        rights, shares = [], []
        for split in splits:
            fit, rest = (np.repeat(np.arange(len(rows)), drawn * side) for side in (split, ~split))
            limits = []
            for group in groups[rest]:  # a relation that was not fitted to has the threshold of all questions
                own = fit[groups[fit] == group] if (groups[fit] == group).any() else fit
                limits.append(brute_force(values[own], closed[own], augmented[own]))
            does = values[rest] < np.array(limits)
            rights.append(np.where(does, augmented[rest], closed[rest]).mean())
            shares.append(does.mean())
        assert found[0][place] == pytest.approx(np.mean(rights))
        assert found[1][place] == pytest.approx(np.mean(shares))


def test_a_resample_that_leaves_nothing_to_fit_to_never_retrieves():
    splits, counts = np.array([[True, False]]), np.array([[0.0, 2.0]])
    right, retrieved = refit(rule_by(np.array([1.0, 2.0])), np.array([0, 0]), np.array([1, 1]), splits, counts)
    assert (right.tolist(), retrieved.tolist()) == ([0.0], [0.0])


def test_what_is_measured_is_the_mean_over_splits_of_what_was_decided():
    popularity, relations, closed, augmented = questions(120)
    splits, rule = draw_splits(120), rule_by(popularity, relations)
    retrieved = decisions(rule, closed, augmented, splits)
    worth, better = measure({"popularity": rule}, closed, augmented, splits, num_resamples=20)
    for name, right in (
        ("popularity", np.where(retrieved, augmented, closed)),
        (NEVER_RETRIEVE, closed),
        (ALWAYS_RETRIEVE, augmented),
        (ORACLE, np.maximum(closed, augmented)),
    ):
        assert worth[name].accuracy.value == pytest.approx(mean_over_splits(right, splits))
        assert worth[name].accuracy.low <= worth[name].accuracy.value <= worth[name].accuracy.high
    assert worth["popularity"].share.value == pytest.approx(mean_over_splits(retrieved, splits))
    assert worth[ALWAYS_RETRIEVE].share.low == worth[ALWAYS_RETRIEVE].share.value == 1.0
    assert better == max((NEVER_RETRIEVE, ALWAYS_RETRIEVE), key=lambda name: worth[name].accuracy.value)


def test_a_questions_accuracy_is_that_of_the_splits_that_leave_it_out():
    popularity, relations, closed, augmented = questions(40)
    splits = np.vstack([draw_splits(40, 6), np.ones((1, 40), dtype=bool)])
    splits[:, 0] = True  # always fitted to
    retrieved = decisions(rule_by(popularity, relations), closed, augmented, splits)
    found = accuracy_left_out(closed, augmented, retrieved, splits)
    assert np.isnan(found).tolist() == splits.all(axis=0).tolist() and math.isnan(found[0])
    for place in np.flatnonzero(~splits.all(axis=0)):
        rights = [
            augmented[place] if does[place] else closed[place]
            for split, does in zip(splits, retrieved, strict=True)
            if not split[place]
        ]
        assert found[place] == pytest.approx(np.mean(rights))


# AUROC ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(VALUES, st.booleans(), st.integers(0, 3)), min_size=1, max_size=12))
def test_auroc_is_the_share_of_pairs_that_are_in_order(rows):
    right = [value for value, is_right, times in rows for _ in range(times) if is_right]
    wrong = [value for value, is_right, times in rows for _ in range(times) if not is_right]
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in right for b in wrong]
    values, is_right, counts = (np.array(column) for column in zip(*rows, strict=True))
    [found] = auroc(values, is_right, counts[None])
    assert found == pytest.approx(np.mean(pairs)) if pairs else math.isnan(found)


def test_auroc_of_a_signal_has_an_interval_and_leaves_out_what_is_unknown():
    popularity, _, closed, _ = questions(300)
    known = signal_auroc(popularity, closed, num_resamples=200)
    assert known is not None and 0.5 < known.low < known.value < known.high
    values = np.append(popularity, [-np.inf, -np.inf])
    with_unknown = signal_auroc(values, np.append(closed, [1, 1]), num_resamples=200)
    assert with_unknown is not None and with_unknown.value == known.value
    assert signal_auroc(popularity, np.ones(300), 10) is None
