"""The policy of when to retrieve: outcomes on disk, costs, and thresholds against brute force."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replug.evals import adaptive
from replug.evals.adaptive import (
    ALWAYS,
    NEVER,
    best_threshold,
    decisions,
    draw_splits,
    fit_thresholds,
    means_left_out,
    measure_pair,
    read_answered,
)
from replug.evals.folder import EvaluationFolder
from tests.support.outcome_folders import made_up_rows, write_evaluation


def test_the_policy_lies_between_never_and_the_oracle_and_costs_what_its_questions_cost(tmp_path):
    made_up = read_answered([EvaluationFolder(write_evaluation(tmp_path / "one", made_up_rows()))])["one"]
    measured = measure_pair(made_up.relations, made_up.methods["none"], made_up.methods["replug@1"])
    by = measured["policies"]
    assert list(by) == ["never", "always", "adaptive", "oracle"]
    share = by["adaptive"]["share"]["value"]
    assert by["never"]["share"]["value"] == 0 < share < by["always"]["share"]["value"] == 1
    best = by[measured["better"]]["accuracy"]["value"]
    assert best < by["adaptive"]["accuracy"]["value"] < by["oracle"]["accuracy"]["value"]
    assert all(of["accuracy"]["low"] <= of["accuracy"]["value"] <= of["accuracy"]["high"] for of in by.values())
    assert by[measured["better"]]["gain"] == {"value": 0, "low": 0, "high": 0}
    assert by["never"]["costs"]["prompt_tokens"] == 240 and by["oracle"]["costs"] == {}
    assert by["adaptive"]["costs"]["retriever_calls"] == pytest.approx(share)
    assert by["adaptive"]["costs"]["prompt_tokens"] == pytest.approx(240 + share * (700 - 240))


# Few different values, so that many are equal.
QUESTION = st.tuples(st.sampled_from([0.0, 1.0, 2.0, 3.5, 1000.0]), st.integers(-1, 1))


def brute_force(values: Sequence[float], gains: Sequence[int]) -> float:
    """Every candidate in turn, the lowest first; the first that no other surpasses."""
    gained = {}
    for threshold in [NEVER, *sorted(set(values)), ALWAYS]:
        gained[threshold] = sum(gain for value, gain in zip(values, gains, strict=True) if value < threshold)
    return next(threshold for threshold, gain in gained.items() if gain == max(gained.values()))


@given(st.lists(QUESTION, min_size=1, max_size=12))
def test_thresholds_are_those_of_brute_force_with_ties(rows):
    values, gains = zip(*rows, strict=True)
    assert best_threshold(np.array(values), np.array(gains)) == brute_force(values, gains)


def test_few_questions_have_the_threshold_of_all(monkeypatch: pytest.MonkeyPatch):
    """Unpopular entities need documents, but in the small relation it is the other way round: chance, of so few."""
    monkeypatch.setattr(adaptive, "MIN_QUESTIONS", 6)
    values, relations = np.array([*range(6), 0, 5]), np.array([*"aaaaaa", *"bb"])
    gains = np.array([1, 1, 1, -1, -1, -1, -1, 1])
    assert fit_thresholds(relations, values, gains) == {"a": 3.0, "others": 3.0}
    splits = np.array([[True] * 6 + [False] * 2])
    assert decisions(relations, values, gains, splits)[0, 6:].tolist() == [True, False]


def questions(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Relations, popularities, some of them equal, and gains: the LM knows what is popular."""
    rng = np.random.default_rng(seed)
    popularity = np.round(10 ** rng.uniform(1, 5, num), -1)
    knows = rng.random(num) < (np.log10(popularity) - 1) / 4
    return rng.choice(list("abcd"), num), popularity, (rng.random(num) < 0.5).astype(int) - knows


def test_the_answers_of_the_test_part_change_no_decision():
    relations, popularity, gains = questions(200)
    rng = np.random.default_rng(5)
    for split in draw_splits(200, 10):
        changed = np.where(split, gains, rng.permutation(1 - gains))
        assert (
            decisions(relations, popularity, changed, split[None])
            == decisions(relations, popularity, gains, split[None])
        ).all()


def test_what_is_measured_is_the_mean_over_splits_of_held_out_questions():
    splits, rng = draw_splits(40, 6), np.random.default_rng(0)
    counts = np.stack([np.ones(40), rng.multinomial(40, [1 / 40] * 40)])
    for values in (rng.random(40), rng.random((6, 40))):
        found = means_left_out(values, splits, counts)
        for drawn, mean in zip(counts.astype(int), found, strict=True):
            each = np.broadcast_to(values, splits.shape)
            means = [np.repeat(of[~split], drawn[~split]).mean() for of, split in zip(each, splits, strict=True)]
            assert mean == pytest.approx(np.mean(means)) and math.isfinite(mean)
