"""Weights are fitted on what they are given, the same each time, and changed for a gain only."""

import numpy as np
import pytest

from replug.answering.factors import Factors
from replug.answering.rerankers import GRID, RERANKERS, GradedQuestion, fit_weights

POE = RERANKERS["poe"]


def question(rng: np.random.Generator, right_by: str) -> GradedQuestion:
    """Three answers of one passage; the right one is the best by one factor, all others are noise."""
    logprobs = {name: -5 * rng.random(3) for name in ("answer_given_question", "question_given_answer", "answer_alone")}
    factors = Factors(("a", "b", "c"), np.zeros(3, int), **logprobs, question_alone=-np.ones(1), passage=np.zeros(1))
    right = int(np.argmax(logprobs[right_by]))
    return GradedQuestion(factors, {answer: float(number == right) for number, answer in enumerate("abc")})


def questions(num: int, right_by: str = "question_given_answer", seed: int = 0) -> list[GradedQuestion]:
    rng = np.random.default_rng(seed)
    return [question(rng, right_by) for _ in range(num)]


def test_the_factor_that_knows_the_answer_gets_the_weight() -> None:
    fitted = fit_weights(POE, questions(60))
    assert fitted.gain > 0.95 > fitted.default_gain + 0.2
    assert fitted.weights["question_given_answer"] > 4 * fitted.weights["answer_alone"]
    assert fitted.weights["question_alone"] == fitted.weights["passage"] == 1.0  # change nothing, so stay
    assert fitted.num_questions == 60
    assert set(fitted.weights.values()) <= set(GRID)
    held_out = questions(60, seed=1)
    assert fit_weights(POE, held_out).default_gain < 0.8


def test_without_questions_or_without_a_gain_the_defaults_stay() -> None:
    assert fit_weights(POE, []).weights == POE.default_weights
    flat = [GradedQuestion(one.factors, dict.fromkeys("abc", 1.0)) for one in questions(10)]
    fitted = fit_weights(POE, flat)
    assert (fitted.weights, fitted.gain, fitted.default_gain) == (POE.default_weights, 1.0, 1.0)


def test_permuting_the_test_parts_answers_changes_no_weight() -> None:
    """As an evaluation does it: a tenth is for fitting, and the rest is graded by other answers."""
    whole = questions(100)

    def fitted(of: list[GradedQuestion]) -> dict:
        return {name: fit_weights(RERANKERS[name], of[:10]) for name in ("direct", "rag", "noisy_channel", "poe")}

    permuted = whole[:10] + [
        GradedQuestion(one.factors, dict(zip("abc", np.roll(list(one.gains.values()), 1), strict=True)))
        for one in whole[10:]
    ]
    assert fitted(whole) == fitted(permuted)
    assert fitted(whole) != fitted(whole[::-1])


@pytest.mark.parametrize("name", list(RERANKERS))
def test_a_question_without_candidates_counts_and_gains_nothing(name: str) -> None:
    empty = Factors((), np.empty(0, int), *(np.empty(0) for _ in range(3)), -np.ones(1), np.zeros(1), np.empty((0, 1)))
    fitted = fit_weights(RERANKERS[name], [GradedQuestion(empty, {})])
    assert (fitted.gain, fitted.num_questions) == (0.0, 1)
