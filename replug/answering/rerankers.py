"""Score answers from factors (Lazaridou et al. 2022, section 3.3), and fit the weights of factors.

A score is a logarithm of any scale: only the order counts. An answer that several passages gave has the score of its
best candidate, or the sum of all where the reranker says so. Weights w are exponents, 1 by default.

    direct         p(a|q,p), of the passage that gave the answer
    rag            the sum of p_tfidf(p|q)^w p(a|q,p)^w over the passages that gave the answer
    noisy_channel  p(q|a,p)^w p(a|p)^w p(a|q,p)^w / p(q|p)^w (Bayes' rule times p(a|q,p), as the paper's footnote)
    poe            the product of experts: p_tfidf(p|q)^w times the noisy channel's

Weights are fitted on the validation part of a set only, by a deterministic coordinate search over a fixed grid: they
make right answers likely where scores are log-probabilities up to a constant. A few questions say nothing about five
weights, so below MIN_QUESTIONS all stay 1. An evaluation writes a file of JSON, which `replug ask --weights` reads:

    {"format": 1, "lm": ..., "reranker": ..., "methods": {"poe@10": {"weights": {"answer_alone": 0.5, ...}, ...}}}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replug.answering.factors import (
    ANSWER_ALONE,
    ANSWER_GIVEN_QUESTION,
    PASSAGE,
    QUESTION_ALONE,
    QUESTION_GIVEN_ANSWER,
    Factors,
)
from replug.config.errors import UserError
from replug.data.files import read_json, write_json
from replug.models.ensemble import log_softmax

Weights = Mapping[str, float]  # by factor
GradedQuestion = tuple[Factors, Mapping[str, float]]  # with the gain of each answer (exact match or accuracy, 0 to 1)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A reranker. `score(factors, weights)` returns the score of each distinct answer, in order.

    `factors` names exactly those that have a weight.
    """

    score: Callable[[Factors, Weights], dict[str, float]]
    factors: tuple[str, ...]

    @property
    def default_weights(self) -> dict[str, float]:
        return dict.fromkeys(self.factors, 1.0)


def best_answer(scores: Mapping[str, float]) -> str:
    """Return the answer of the largest score, the first of equals; empty if there is none."""
    return max(scores, key=lambda answer: scores[answer], default="")


def _direct(factors: Factors, weights: Weights) -> dict[str, float]:
    return _best(factors, weights[ANSWER_GIVEN_QUESTION] * factors.answer_given_question)


def _rag(factors: Factors, weights: Weights) -> dict[str, float]:
    shares = _power(factors.passage, weights[PASSAGE])[factors.passages]
    joint = shares + _power(factors.answer_given_question, weights[ANSWER_GIVEN_QUESTION])
    return {answer: float(np.logaddexp.reduce(joint[own])) for answer, own in _rows(factors).items()}


def _noisy_channel(factors: Factors, weights: Weights) -> dict[str, float]:
    return _best(factors, _channel(factors, weights))


def _product_of_experts(factors: Factors, weights: Weights) -> dict[str, float]:
    shares = _power(factors.passage, weights[PASSAGE])[factors.passages]
    return _best(factors, shares + _channel(factors, weights))


def _channel(factors: Factors, weights: Weights) -> np.ndarray:
    """Return log p(q|a,p)^w p(a|p)^w p(a|q,p)^w / p(q|p)^w [C]."""
    return (
        _power(factors.question_given_answer, weights[QUESTION_GIVEN_ANSWER])
        + _power(factors.answer_alone, weights[ANSWER_ALONE])
        + _power(factors.answer_given_question, weights[ANSWER_GIVEN_QUESTION])
        - _power(factors.question_alone, weights[QUESTION_ALONE])[factors.passages]
    )


def _power(logprobs: np.ndarray, weight: float) -> np.ndarray:
    """Return the logarithm of probabilities to the power of a weight: 0 for a weight of 0."""
    return weight * logprobs if weight else np.zeros_like(logprobs)


def _best(factors: Factors, scores: np.ndarray) -> dict[str, float]:
    return {answer: float(scores[own].max()) for answer, own in _rows(factors).items()}


def _rows(factors: Factors) -> dict[str, list[int]]:
    """Return the candidates of each distinct answer."""
    rows: dict[str, list[int]] = {}
    for row, answer in enumerate(factors.answers):
        rows.setdefault(answer, []).append(row)
    return rows


_CHANNEL = (QUESTION_GIVEN_ANSWER, ANSWER_ALONE, ANSWER_GIVEN_QUESTION, QUESTION_ALONE)
RERANKERS = {
    "direct": Reranker(_direct, (ANSWER_GIVEN_QUESTION,)),
    "rag": Reranker(_rag, (PASSAGE, ANSWER_GIVEN_QUESTION)),
    "noisy_channel": Reranker(_noisy_channel, _CHANNEL),
    "poe": Reranker(_product_of_experts, (PASSAGE, *_CHANNEL)),
}


GRID = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
FORMAT = 1
FIELDS = {"lm", "reranker", "methods"}
MIN_QUESTIONS = 30
SMALLEST_SHARE = 1e-9  # of an answer from a passage of no probability
MAX_ROUNDS = 10  # through all factors; it ends earlier where a round changes nothing


def write_weights(path: Path, lm: str, reranker: str, methods: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the weights by method, such as poe@10, and how well they did, with the LMs that they belong to."""
    write_json(path, {"format": FORMAT, "lm": lm, "reranker": reranker, "methods": methods})


def read_weights(path: Path, lm: str, reranker: str, method: str) -> Weights:
    """Return the weights of a method. Raises UserError for another file, other LMs, or a missing method."""
    kept = read_json(path, "give the weights.json of an evaluation=internet_qa")
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or not kept.keys() >= FIELDS:
        raise UserError(f"{path} holds no weights; expected the weights.json of an evaluation=internet_qa")
    for role, identity in (("lm", lm), ("reranker", reranker)):
        if kept[role] != identity:
            raise UserError(f"{path} was fitted with the {role} {kept[role]}, not {identity}; fit others")
    if method not in kept["methods"]:
        known = ", ".join(kept["methods"]) or "none"
        raise UserError(f"{path} has no weights of {method}; expected --rerank and --k of one of: {known}")
    weights, factors = kept["methods"][method].get("weights"), RERANKERS[method.partition("@")[0]].factors
    if not isinstance(weights, dict) or set(weights) != set(factors) or not all(map(_is_weight, weights.values())):
        expected = "expected a number of 0 or more for each factor"
        raise UserError(f"{path}: {method} has the weights {weights}; {expected}")
    return {name: float(weight) for name, weight in weights.items()}


def _is_weight(weight: Any) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < np.inf


def fit_weights(reranker: Reranker, questions: Sequence[GradedQuestion]) -> tuple[Weights, float, float]:
    """Return the weights that make right answers likeliest, their mean gain, and that of the default weights.

    The search begins at the defaults and changes one weight at a time. Of equals it takes the weights closest to the
    defaults. It returns these for fewer than MIN_QUESTIONS questions, and for one factor alone: no order changes.
    """
    defaults = reranker.default_weights

    def quality(weights: Weights) -> tuple[float, float]:
        distance = sum(abs(weights[factor] - defaults[factor]) for factor in reranker.factors)
        return _mean_log_share(reranker, questions, weights), -distance

    weights = defaults
    for _ in range(MAX_ROUNDS if len(questions) >= MIN_QUESTIONS and len(defaults) > 1 else 0):
        before = weights
        for factor in reranker.factors:
            values = dict.fromkeys([weights[factor], *GRID])  # max takes the first of equals
            variants = [{**weights, factor: value} for value in values]
            weights = max((variant for variant in variants if any(variant.values())), key=quality)
        if weights == before:
            break
    return weights, _mean_gain(reranker, questions, weights), _mean_gain(reranker, questions, defaults)


def _mean_log_share(reranker: Reranker, questions: Sequence[GradedQuestion], weights: Weights) -> float:
    """Return the mean log of right answers' share of exp(score), over questions with some right and some wrong answer.

    It changes with every weight, where which answer is best changes for a few questions.
    """
    logs = []
    for factors, gains in questions:
        if min(gains.values(), default=0) < max(gains.values(), default=0):
            scores = reranker.score(factors, weights)
            shares = log_softmax(np.array(list(scores.values())))
            right = np.log([max(gains[answer], SMALLEST_SHARE) for answer in scores])
            logs.append(max(float(np.logaddexp.reduce(shares + right)), np.log(SMALLEST_SHARE)))
    return float(np.mean(logs)) if logs else 0.0


def _mean_gain(reranker: Reranker, questions: Sequence[GradedQuestion], weights: Weights) -> float:
    """Return the mean gain of the best answers; a question without candidates gains nothing, and counts."""
    gained = []
    for factors, gains in questions:
        best = best_answer(reranker.score(factors, weights))
        gained.append(gains[best] if best else 0.0)
    return float(np.mean(gained)) if gained else 0.0
