"""Every reranker against an example that is computed by hand, and the fitting of its weights."""

import math
from dataclasses import replace

import numpy as np
import pytest

from replug.answering.answerer import (
    GRID,
    RERANKERS,
    Factors,
    GradedQuestion,
    best_answer,
    fit_weights,
    normalized_over_labels,
)

# Two passages; "a" was given by both, "b" by the first, "c" by the second.
A_GIVEN_QP = [0.5, 0.25, 0.125, 0.5]  # a of the first, b, a of the second, c
Q_GIVEN_AP = [0.1, 0.4, 0.2, 0.1]
A_GIVEN_P = [0.2, 0.1, 0.3, 0.4]
Q_GIVEN_P = [0.05, 0.02]
P_GIVEN_Q = [0.75, 0.25]


def factors_of() -> Factors:
    return Factors(
        ("a", "b", "a", "c"),
        np.array([0, 0, 1, 1]),
        *(np.log(some) for some in (A_GIVEN_QP, Q_GIVEN_AP, A_GIVEN_P, Q_GIVEN_P, P_GIVEN_Q)),
    )


BY_HAND = {
    "direct": {"a": 0.5, "b": 0.25, "c": 0.5},
    "rag": {"a": 0.75 * 0.5 + 0.25 * 0.125, "b": 0.75 * 0.25, "c": 0.25 * 0.5},
    "noisy_channel": {  # the better of 0.1 * 0.2 * 0.5 / 0.05 = 0.2 and 0.2 * 0.3 * 0.125 / 0.02 = 0.375
        "a": 0.375,
        "b": 0.4 * 0.1 * 0.25 / 0.05,
        "c": 0.1 * 0.4 * 0.5 / 0.02,
    },
    "poe": {  # the better of 0.75 * 0.2 and 0.25 * 0.375
        "a": 0.15,
        "b": 0.75 * 0.4 * 0.1 * 0.25 / 0.05,
        "c": 0.25 * 0.1 * 0.4 * 0.5 / 0.02,
    },
}


@pytest.mark.parametrize("name", list(RERANKERS))
def test_scores_equal_those_computed_by_hand(name: str) -> None:
    scores = RERANKERS[name].score(factors_of(), RERANKERS[name].default_weights)
    assert list(scores) == ["a", "b", "c"]
    assert {answer: math.exp(score) for answer, score in scores.items()} == pytest.approx(BY_HAND[name])


def test_weights_are_exponents() -> None:
    weights = {"question_given_answer": 2.0, "answer_alone": 0.5, "answer_given_question": 0.0, "question_alone": 1.0}
    scores = RERANKERS["noisy_channel"].score(factors_of(), weights)
    assert math.exp(scores["b"]) == pytest.approx(0.4**2 * 0.1**0.5 / 0.05)
    scores = RERANKERS["poe"].score(factors_of(), weights | {"passage": 3.0})
    assert math.exp(scores["b"]) == pytest.approx(0.75**3 * 0.4**2 * 0.1**0.5 / 0.05)
    scores = RERANKERS["rag"].score(factors_of(), {"passage": 2.0, "answer_given_question": 0.5})
    assert math.exp(scores["a"]) == pytest.approx(0.75**2 * 0.5**0.5 + 0.25**2 * 0.125**0.5)


def test_a_passage_of_no_probability_gives_its_answers_none_unless_it_weighs_nothing() -> None:
    factors = replace(factors_of(), passage=np.array([0.0, -np.inf]))
    for name in ("rag", "poe"):
        weights = RERANKERS[name].default_weights
        scores = RERANKERS[name].score(factors, weights)
        assert not any(math.isnan(score) for score in scores.values())
        assert best_answer(scores) in ("a", "b")
        assert all(map(math.isfinite, RERANKERS[name].score(factors, weights | {"passage": 0.0}).values()))
    assert RERANKERS["rag"].score(factors, {"passage": 1.0, "answer_given_question": 1.0})["c"] == -math.inf


# Factors ---------------------------------------------------------------------------------------------------------


def test_the_factors_of_fewer_passages_are_those_of_what_these_gave() -> None:
    first = factors_of().of_first(1)
    assert (first.answers, first.distinct) == (("a", "b"), ("a", "b"))
    np.testing.assert_allclose(np.exp(first.answer_given_question), [0.5, 0.25])
    np.testing.assert_allclose(np.exp(first.question_alone), [0.05])
    np.testing.assert_allclose(first.passage, [0.0])  # its share of the first
    both = factors_of().of_first(2)
    for one, other in zip(factors_of().passage, both.passage, strict=True):
        assert one == pytest.approx(other)
    none = factors_of().of_first(0)
    assert (none.answers, len(none.passage)) == ((), 0)


def test_labels_probabilities_are_shares_within_each_passage() -> None:
    factors = Factors(
        ("yes", "no", "yes", "no"),
        np.array([0, 0, 1, 1]),
        np.log([0.3, 0.1, 0.2, 0.2]),
        np.log([0.5, 0.5, 0.5, 0.5]),
        np.log([0.1, 0.4, 0.3, 0.1]),
        np.log([0.1, 0.1]),
        np.log([0.6, 0.4]),
    )
    shared = normalized_over_labels(factors)
    np.testing.assert_allclose(np.exp(shared.answer_given_question), [0.75, 0.25, 0.5, 0.5])
    np.testing.assert_allclose(np.exp(shared.answer_alone), [0.2, 0.8, 0.75, 0.25])
    np.testing.assert_array_equal(shared.question_given_answer, factors.question_given_answer)


def test_a_factor_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="answer_given_question holds"):
        replace(factors_of(), answer_given_question=np.array([np.nan, -1, -1, -1]))


# Fitted weights --------------------------------------------------------------------------------------------------

POE = RERANKERS["poe"]


def question(rng: np.random.Generator, right_by: str) -> GradedQuestion:
    """Three answers of one passage; the right one is the best by one factor, all others are noise."""
    logprobs = {name: -5 * rng.random(3) for name in ("answer_given_question", "question_given_answer", "answer_alone")}
    factors = Factors(("a", "b", "c"), np.zeros(3, int), **logprobs, question_alone=-np.ones(1), passage=np.zeros(1))
    right = int(np.argmax(logprobs[right_by]))
    return factors, {answer: float(number == right) for number, answer in enumerate("abc")}


def questions(num: int, right_by: str = "question_given_answer", seed: int = 0) -> list[GradedQuestion]:
    rng = np.random.default_rng(seed)
    return [question(rng, right_by) for _ in range(num)]


def test_the_factor_that_knows_the_answer_gets_the_weight() -> None:
    weights, gain, default_gain = fit_weights(POE, questions(60))
    assert gain > 0.95 > default_gain + 0.2
    assert weights["question_given_answer"] > 4 * weights["answer_alone"]
    assert weights["question_alone"] == weights["passage"] == 1.0  # change nothing, so stay
    assert set(weights.values()) <= set(GRID)


def test_without_questions_or_without_a_gain_the_defaults_stay() -> None:
    assert fit_weights(POE, []) == (POE.default_weights, 0.0, 0.0)
    flat = [(factors, dict.fromkeys("abc", 1.0)) for factors, _ in questions(10)]
    assert fit_weights(POE, flat) == (POE.default_weights, 1.0, 1.0)


def test_a_question_without_candidates_counts_and_gains_nothing() -> None:
    empty = Factors((), np.empty(0, int), *(np.empty(0) for _ in range(3)), -np.ones(1), np.zeros(1))
    assert fit_weights(POE, [(empty, {})])[1] == 0.0
