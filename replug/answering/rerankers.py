"""From factors to scores of answers: pure arithmetic on numpy arrays (Lazaridou et al. 2022, section 2.4).

A reranker is a function of factors and weights. Its score of an answer is a logarithm, of any scale: only the order
counts. An answer that several passages gave has the score of the best of these candidates, or the sum of all where
the reranker says so. Weights w are exponents; each is 1 where nothing was fitted.

    direct         p(a|q,p), of the passage that gave the answer
    rag            the sum of p_tfidf(p|q)^w p(a|q,p)^w over the passages that gave the answer
    rag_full       the same sum over all passages
    noisy_channel  p(q|a,p)^w p(a|p)^w p(a|q,p)^w / p(q|p)^w
    poe            the product of experts: p_tfidf(p|q)^w times the noisy channel's

The noisy channel proper is Bayes' rule, p(q|a,p) p(a|p) / p(q|p). The paper's footnote multiplies it by p(a|q,p),
which is the same quantity as the LM says it directly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from replug.answering.factors import (
    ANSWER_ALONE,
    ANSWER_GIVEN_QUESTION,
    PASSAGE,
    QUESTION_ALONE,
    QUESTION_GIVEN_ANSWER,
    Factors,
)

Weights = Mapping[str, float]  # by factor


@dataclass(frozen=True, slots=True)
class Reranker:
    """`score(factors, weights)` gives each distinct answer its score, in the order of `Factors.distinct`.

    `factors` names what the weights are of, all of them and no other. `needs_all_passages`: `answer_by_passage`.
    """

    score: Callable[[Factors, Weights], dict[str, float]]
    factors: tuple[str, ...]
    needs_all_passages: bool = False

    @property
    def default_weights(self) -> dict[str, float]:
        return dict.fromkeys(self.factors, 1.0)


def best_answer(scores: Mapping[str, float]) -> str:
    """The answer of the largest score, the first of equals; empty where there is none."""
    return max(scores, key=lambda answer: scores[answer], default="")


def _direct(factors: Factors, weights: Weights) -> dict[str, float]:
    return _best(factors, weights[ANSWER_GIVEN_QUESTION] * factors.answer_given_question)


def _rag(factors: Factors, weights: Weights) -> dict[str, float]:
    of_passage = _power(factors.passage, weights[PASSAGE])[factors.passages]
    joint = of_passage + _power(factors.answer_given_question, weights[ANSWER_GIVEN_QUESTION])
    return {answer: _log_sum(joint[own]) for answer, own in _rows(factors).items()}


def _rag_full(factors: Factors, weights: Weights) -> dict[str, float]:
    if factors.answer_by_passage is None:
        raise ValueError("rag_full needs the factors of every answer given every passage; expected answer_by_passage")
    of_passage = _power(factors.passage, weights[PASSAGE])
    joint = of_passage + _power(factors.answer_by_passage, weights[ANSWER_GIVEN_QUESTION])
    return {answer: _log_sum(row) for answer, row in zip(factors.distinct, joint, strict=True)}


def _noisy_channel(factors: Factors, weights: Weights) -> dict[str, float]:
    return _best(factors, _channel(factors, weights))


def _product_of_experts(factors: Factors, weights: Weights) -> dict[str, float]:
    of_passage = _power(factors.passage, weights[PASSAGE])[factors.passages]
    return _best(factors, of_passage + _channel(factors, weights))


def _channel(factors: Factors, weights: Weights) -> np.ndarray:
    """[C]"""
    return (
        _power(factors.question_given_answer, weights[QUESTION_GIVEN_ANSWER])
        + _power(factors.answer_alone, weights[ANSWER_ALONE])
        + _power(factors.answer_given_question, weights[ANSWER_GIVEN_QUESTION])
        - _power(factors.question_alone, weights[QUESTION_ALONE])[factors.passages]
    )


def _power(logprobs: np.ndarray, weight: float) -> np.ndarray:
    """The logarithm of probabilities to the power of a weight: of weight 0 it is 0, whatever the probability."""
    return weight * logprobs if weight else np.zeros_like(logprobs)


def _best(factors: Factors, scores: np.ndarray) -> dict[str, float]:
    return {answer: float(scores[own].max()) for answer, own in _rows(factors).items()}


def _log_sum(logs: np.ndarray) -> float:
    return float(np.logaddexp.reduce(logs))


def _rows(factors: Factors) -> dict[str, list[int]]:
    """The candidates of each distinct answer."""
    rows: dict[str, list[int]] = {}
    for row, answer in enumerate(factors.answers):
        rows.setdefault(answer, []).append(row)
    return rows


_CHANNEL = (QUESTION_GIVEN_ANSWER, ANSWER_ALONE, ANSWER_GIVEN_QUESTION, QUESTION_ALONE)
RERANKERS = {
    "direct": Reranker(_direct, (ANSWER_GIVEN_QUESTION,)),
    "rag": Reranker(_rag, (PASSAGE, ANSWER_GIVEN_QUESTION)),
    "rag_full": Reranker(_rag_full, (PASSAGE, ANSWER_GIVEN_QUESTION), needs_all_passages=True),
    "noisy_channel": Reranker(_noisy_channel, _CHANNEL),
    "poe": Reranker(_product_of_experts, (PASSAGE, *_CHANNEL)),
}
