"""The policy of when to retrieve: outcomes on disk, costs, and thresholds against brute force."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.evals.adaptive import measure_pair, read_answered
from replug.evals.folder import EvaluationFolder
from replug.evals.thresholds import (
    ADAPTIVE,
    ALWAYS,
    ALWAYS_RETRIEVE,
    NEVER,
    NEVER_RETRIEVE,
    ORACLE,
    accuracy_left_out,
    decisions,
    draw_splits,
    fit_thresholds,
    mean_over_splits,
    measure,
    refit,
    rule_by,
)
from tests.support.outcome_folders import made_up_rows, write_evaluation


def test_the_policy_lies_between_never_and_the_oracle_and_costs_what_its_questions_cost(tmp_path):
    [made_up] = read_answered([EvaluationFolder(write_evaluation(tmp_path / "one", made_up_rows()))])
    measured = measure_pair(made_up, ("none", "replug@1"), num_resamples=50)
    by = measured["policies"]
    assert list(by) == ["never", "always", "adaptive", "oracle"]
    share = by["adaptive"]["share"]["value"]
    assert by["never"]["share"]["value"] == 0 < share < by["always"]["share"]["value"] == 1
    best = by[measured["better"]]["accuracy"]["value"]
    assert best < by["adaptive"]["accuracy"]["value"] < by["oracle"]["accuracy"]["value"]
    assert by["never"]["costs"]["prompt_tokens"] == 240 and by["oracle"]["costs"] == {}
    assert by["adaptive"]["costs"]["retriever_calls"] == pytest.approx(share)
    assert by["adaptive"]["costs"]["prompt_tokens"] == pytest.approx(240 + share * (700 - 240))


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


def test_what_is_measured_is_the_mean_over_splits_of_what_was_decided():
    popularity, relations, closed, augmented = questions(120)
    splits, rule = draw_splits(120), rule_by(popularity, relations)
    retrieved = decisions(rule, closed, augmented, splits)
    worth, better = measure(rule, closed, augmented, splits, num_resamples=20)
    for name, right in (
        (ADAPTIVE, np.where(retrieved, augmented, closed)),
        (NEVER_RETRIEVE, closed),
        (ALWAYS_RETRIEVE, augmented),
        (ORACLE, np.maximum(closed, augmented)),
    ):
        assert worth[name]["accuracy"]["value"] == pytest.approx(mean_over_splits(right, splits))
        assert worth[name]["accuracy"]["low"] <= worth[name]["accuracy"]["value"] <= worth[name]["accuracy"]["high"]
    assert worth[ADAPTIVE]["share"]["value"] == pytest.approx(mean_over_splits(retrieved, splits))
    assert worth[ALWAYS_RETRIEVE]["share"]["low"] == worth[ALWAYS_RETRIEVE]["share"]["value"] == 1.0
    assert better == max((NEVER_RETRIEVE, ALWAYS_RETRIEVE), key=lambda name: worth[name]["accuracy"]["value"])


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
