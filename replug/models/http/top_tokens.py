"""The likeliest next token of a mixture, of which each part shows its few likeliest tokens only.

A token that a part does not show is there at most as likely as the least of those it shows. So the mixture's likeliest
token is known where all others, with the most that they can have, stay below it; what would have to be asked to know
it is known else. Pure. K parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class TopTokens:
    """What is seen of a next-token distribution: log-probs (nats) by id, and the most that any other token can have.

    `own` is the likeliest, with which the part itself goes on.
    """

    logprobs: Mapping[int, float]
    most_of_others: float
    own: int

    def with_scores(self, logprobs: Mapping[int, float]) -> "TopTokens":
        """With tokens that were asked for."""
        return replace(self, logprobs={**logprobs, **self.logprobs})


def own_logprobs(steps: Sequence[TopTokens]) -> np.ndarray:
    """Of what a part goes on with, float32 [T]."""
    return np.array([step.logprobs[step.own] for step in steps], dtype=np.float32)


def contenders(parts: Sequence[TopTokens], weights: Sequence[float]) -> list[int]:
    """The shown tokens that may be the mixture's likeliest; the likeliest so far first, of equals the lower id."""
    shown = sorted({token for part in parts for token in part.logprobs})
    least = {token: _probability(parts, weights, token, others=False) for token in shown}
    best = max(least.values())
    some = [token for token in shown if _probability(parts, weights, token, others=True) >= best]
    return sorted(some, key=lambda token: -least[token])


def not_shown(parts: Sequence[TopTokens], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The part's place and the token, of every one of the tokens that a part does not show."""
    return [(place, token) for token in tokens for place, part in enumerate(parts) if token not in part.logprobs]


def is_likeliest(parts: Sequence[TopTokens], weights: Sequence[float], token: int) -> bool:
    """Whether no token that no part shows can be likelier."""
    unseen = np.dot(weights, np.exp([part.most_of_others for part in parts]))
    return bool(unseen < _probability(parts, weights, token, others=False))


def mixed_logprob(parts: Sequence[TopTokens], weights: Sequence[float], token: int) -> float:
    """Nats, of a token that all parts show."""
    return float(np.log(np.dot(weights, np.exp([part.logprobs[token] for part in parts]))))


def least_logprob(parts: Sequence[TopTokens], weights: Sequence[float], token: int) -> float:
    """Nats, the least that it can be: exact where all parts show the token."""
    return math.log(_probability(parts, weights, token, others=False))


def _probability(parts: Sequence[TopTokens], weights: Sequence[float], token: int, others: bool) -> float:
    """The least that it is by what is shown; with `others` the most that it can be."""
    values = [part.logprobs.get(token, part.most_of_others if others else -math.inf) for part in parts]
    return float(np.dot(weights, np.exp(values)))
