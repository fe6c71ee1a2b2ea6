"""What answers cost, and what a policy costs that answers some questions one way and some the other. Pure.

Costs are means over questions. A number that was not measured is NaN, and so is every mean that needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from replug.evals.adaptive.protocol import mean_over_splits

PER_MILLION, QUESTIONS_OF_A_PRICE = 1e6, 1000


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for a million tokens of prompts, and for a million that are generated."""

    prompt: float
    generated: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a question: calls of the LM and of the retriever, tokens, and seconds from the question to its answer."""

    lm_calls: float
    retriever_calls: float
    prompt_tokens: float
    generated_tokens: float
    seconds: float

    def dollars(self, prices: Prices) -> float:
        """Of a thousand questions."""
        tokens = self.prompt_tokens * prices.prompt + self.generated_tokens * prices.generated
        return tokens / PER_MILLION * QUESTIONS_OF_A_PRICE


COUNTED = ("lm_calls", "retriever_calls", "prompt_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class WayCosts:
    """Of one way to answer: by name what is counted of each question [N], and the mean seconds of a question.

    `search_seconds` are those of them in which documents are found.
    """

    counted: Mapping[str, np.ndarray]
    seconds: float
    search_seconds: float

    def mean(self) -> Costs:
        return Costs(**{name: float(np.mean(self.counted[name])) for name in COUNTED}, seconds=self.seconds)


def policy_costs(
    closed: WayCosts, augmented: WayCosts, retrieved: np.ndarray, splits: np.ndarray, asks_first: bool, searches: bool
) -> Costs:
    """Of a policy that retrieves where `retrieved` [S, N] says, over what `splits` [S, N] left to measure.

    `asks_first`: the signal is the closed-book answer's, which is paid for by who retrieves too. `searches`: it is the
    retriever's, so every question is searched for.
    """
    share = mean_over_splits(retrieved, splits)
    counted = {}
    for name in COUNTED:
        first = closed.counted[name] if asks_first else 0
        searched = augmented.counted[name] if searches and name == "retriever_calls" else 0
        each = np.where(retrieved, augmented.counted[name] + first, closed.counted[name] + searched)
        counted[name] = mean_over_splits(each, splits)
    without_documents = closed.seconds + (augmented.search_seconds if searches else 0)
    with_documents = augmented.seconds + (closed.seconds if asks_first else 0)
    return Costs(**counted, seconds=(1 - share) * without_documents + share * with_documents)
