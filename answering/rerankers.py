"""From factors to scores of answers: pure arithmetic on numpy arrays (Lazaridou et al. 2022, section 2.4).

A reranker is a function of factors and weights. Its score of an answer is a logarithm, of any scale: only the order
counts. Each has default weights of 1 for its factors, with which it needs no fitting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from replug.answering.factors import Factors

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


RERANKERS: dict[str, Reranker] = {}  # direct, rag, rag_full, noisy_channel, poe


def best_answer(scores: Mapping[str, float]) -> str:
    """The answer of the largest score, the first of equals; empty where there is none."""
    raise NotImplementedError
