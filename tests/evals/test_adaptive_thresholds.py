"""Fitted thresholds against brute force, and what they are worth against a plain loop over splits and resamples."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replug.evals.adaptive.protocol import (
    ALWAYS_RETRIEVE,
    NEVER_RETRIEVE,
    ORACLE,
    Questions,
    Rule,
    accuracy_left_out,
    auroc,
    decisions,
    draw_splits,
    mean_over_splits,
    measure,
    signal_auroc,
)
from replug.evals.adaptive.thresholds import ALWAYS, NEVER, fit_threshold, fit_thresholds, refit, retrieves

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
def test_a_threshold_is_that_of_brute_force_with_ties_and_unknown_values(rows):
    values, _, closed, augmented = columns(rows)
    assert fit_threshold(values, closed, augmented) == brute_force(values, closed, augmented)


@given(st.lists(QUESTION, min_size=1, max_size=12))
def test_each_relation_is_fitted_by_itself_and_all_together(rows):
    values, relations, closed, augmented = columns(rows)
    fitted = fit_thresholds(values, relations, closed, augmented)
    assert fitted.by_relation.keys() == set(relations)
    for relation, threshold in fitted.by_relation.items():
        own = [row for row in rows if row[1] == relation]
        assert threshold == brute_force(*[column for column in zip(*own, strict=True) if column[0] != relation])
    assert fitted.pooled == brute_force(values, closed, augmented)


def test_of_equally_right_thresholds_the_one_that_retrieves_least_is_taken():
    values = np.array([1.0, 2.0, 3.0])
    assert fit_threshold(values, np.array([0, 0, 0]), np.array([1, 0, 0])) == 2.0
    assert fit_threshold(values, np.array([0, 0, 1]), np.array([1, 0, 0])) == 2.0
    assert fit_threshold(values, np.array([1, 0, 0]), np.array([0, 1, 0])) == NEVER


def test_a_relation_that_was_not_fitted_to_has_the_threshold_of_all():
    fitted = fit_thresholds(np.array([1.0, 2.0]), ["a", "a"], np.array([0, 1]), np.array([1, 0]))
    assert fitted.of("b") == fitted.of(None) == fitted.pooled == 2.0


# Splits -----------------------------------------------------------------------------------------------------------


def questions(num: int, seed: int = 0, relations: str = "abcd") -> tuple[Questions, np.ndarray]:
    """The LM knows the popular ones, retrieval finds what is rare; and popularities, some of them equal."""
    rng = np.random.default_rng(seed)
    popularity = np.round(10 ** rng.uniform(1, 5, num), -1)
    knows = rng.random(num) < (np.log10(popularity) - 1) / 4
    finds = rng.random(num) < 0.5
    names = tuple(rng.choice(list(relations), num).tolist())
    return Questions(names, knows.astype(int), finds.astype(int)), popularity


def test_splits_have_three_quarters_to_fit_to_and_are_the_same_for_the_same_seed():
    splits = draw_splits(600)
    assert splits.shape == (100, 600) and (splits.sum(axis=1) == 450).all()
    assert (splits == draw_splits(600)).all() and (splits != draw_splits(600, seed=1)).any()
    assert not (splits[0] == splits[1]).all()
    assert draw_splits(2, 5).sum(axis=1).tolist() == [1] * 5


def test_the_answers_of_the_test_part_change_no_decision():
    asked, popularity = questions(200)
    splits = draw_splits(200, 10)
    before = decisions(asked, Rule(popularity), splits)
    rng = np.random.default_rng(5)
    for split, retrieved in zip(splits, before, strict=True):
        rest, changed = np.flatnonzero(~split), {}
        for name in ("closed", "augmented"):
            changed[name] = getattr(asked, name).copy()
            changed[name][rest] = rng.permutation(1 - changed[name][rest])
        other = Questions(asked.relations, **changed)
        assert (decisions(other, Rule(popularity), split[None])[0] == retrieved).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(QUESTION, min_size=3, max_size=14),
    st.integers(0, 1000),
    st.booleans(),
)
def test_refitting_all_resamples_at_once_is_refitting_one_at_a_time(rows, seed, by_relation):
    values, relations, closed, augmented = columns(rows)
    groups = relations if by_relation else ["all"] * len(rows)
    splits = draw_splits(len(rows), 4, seed)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(rows), [1 / len(rows)] * len(rows), size=5).astype(float)
    # A resample that lies wholly on one side of a split leaves nothing to fit to or to measure.
    sides = [(counts @ side.T).min(axis=1) > 0 for side in (splits, ~splits)]
    counts = counts[sides[0] & sides[1]]
    rates = refit(values, groups, closed, augmented, splits, counts)
    for row, drawn in enumerate(counts.astype(int)):
        rights, shares = [], []
        for split in splits:
            fit, rest = (np.repeat(np.arange(len(rows)), drawn * side) for side in (split, ~split))
            fitted = fit_thresholds(values[fit], [groups[one] for one in fit], closed[fit], augmented[fit])
            does = retrieves(values[rest], [groups[one] for one in rest], fitted)
            rights.append(np.where(does, augmented[rest], closed[rest]).mean())
            shares.append(does.mean())
        assert rates.right[row] == pytest.approx(np.mean(rights))
        assert rates.retrieved[row] == pytest.approx(np.mean(shares))


def test_what_is_measured_is_the_mean_over_splits_of_what_was_decided():
    asked, popularity = questions(120)
    splits = draw_splits(120)
    rule = Rule(popularity)
    retrieved = decisions(asked, rule, splits)
    right = np.where(retrieved, asked.augmented, asked.closed)
    worth = measure(asked, {"popularity": rule}, splits, num_resamples=20)
    assert worth["popularity"].accuracy.value == pytest.approx(mean_over_splits(right, splits))
    assert worth["popularity"].share.value == pytest.approx(mean_over_splits(retrieved, splits))
    assert worth[NEVER_RETRIEVE].accuracy.value == pytest.approx(mean_over_splits(asked.closed, splits))
    assert worth[ALWAYS_RETRIEVE].accuracy.value == pytest.approx(mean_over_splits(asked.augmented, splits))
    assert worth[ALWAYS_RETRIEVE].share == worth[ALWAYS_RETRIEVE].share.__class__(1.0, 1.0, 1.0)
    assert worth[ORACLE].accuracy.value == pytest.approx(
        mean_over_splits(np.maximum(asked.closed, asked.augmented), splits)
    )
    for one in worth.values():
        assert one.accuracy.low <= one.accuracy.value <= one.accuracy.high


def test_a_questions_accuracy_is_that_of_the_splits_that_leave_it_out():
    asked, popularity = questions(40)
    splits = np.vstack([draw_splits(40, 6), np.ones((1, 40), dtype=bool)])
    splits[:, 0] = True  # always fitted to
    rule = Rule(popularity)
    found = accuracy_left_out(asked, rule, splits)
    assert math.isnan(found[0])
    retrieved = decisions(asked, rule, splits)
    for place in np.flatnonzero(~splits.all(axis=0)):
        rights = [
            asked.augmented[place] if does[place] else asked.closed[place]
            for split, does in zip(splits, retrieved, strict=True)
            if not split[place]
        ]
        assert found[place] == pytest.approx(np.mean(rights))
    assert math.isnan(found[splits.all(axis=0)].max())


def test_a_resample_that_leaves_nothing_to_fit_to_never_retrieves():
    splits, counts = np.array([[True, False]]), np.array([[0.0, 2.0]])
    rates = refit(np.array([1.0, 2.0]), ["a", "a"], np.array([0, 0]), np.array([1, 1]), splits, counts)
    assert (rates.right.tolist(), rates.retrieved.tolist()) == ([0.0], [0.0])


def test_a_signal_that_tells_gains_and_one_that_does_not_gains_nothing():
    asked, popularity = questions(800, relations="a")
    noise = np.random.default_rng(9).random(800)
    worth = measure(asked, {"popularity": Rule(popularity), "noise": Rule(noise)}, draw_splits(800), num_resamples=200)
    assert worth["popularity"].gain.low > 0
    assert worth["noise"].gain.low < 0
    assert 0.2 < worth["popularity"].share.value < 0.8


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
    asked, popularity = questions(300)
    known = signal_auroc(popularity, asked.closed, num_resamples=200)
    assert known is not None and 0.5 < known.low < known.value < known.high
    values = np.append(popularity, [-np.inf, -np.inf])
    with_unknown = signal_auroc(values, np.append(asked.closed, [1, 1]), num_resamples=200)
    assert with_unknown is not None and with_unknown.value == known.value
    assert signal_auroc(popularity, np.ones(300), 10) is None
