"""The likeliest next token of a mixture, of which each part shows its few likeliest tokens only.

A token that a part does not show is there at most as likely as the least of those it shows. So the mixture's likeliest
token is known where all others, with the most that they can have, stay below it; what would have to be asked to know
it is known else. K parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from replug.models.http.completions_api import ShownAnswer
from replug.models.http.echoed_tokens import BROKEN

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

BY_ID = "token_id:"
UNSURE = f"{BROKEN} "  # at the ends of an answer: a part of a character, and a blank that some decoders drop


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


def _probability(parts: Sequence[TopTokens], weights: Sequence[float], token: int, others: bool) -> float:
    """The least that it is by what is shown; with `others` the most that it can be."""
    values = [part.logprobs.get(token, part.most_of_others if others else -math.inf) for part in parts]
    return float(np.dot(weights, np.exp(values)))


class TokenNames:
    """The tokens of a tokenizer by what they are shown as.

    Servers show a token of an answer decoded, or as `token_id:17` where they can be asked to. Several tokens may be
    shown alike: parts of characters, and words with and without the blank before them in some tokenizers. Such a text
    names none.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.ends = {tokenizer.eos_token_id}

    def decode(self, ids: list[int]) -> str:
        """As local weights decode an answer."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def steps(self, answer: ShownAnswer, num_tops: int) -> list[TopTokens]:
        """Of an answer's tokens, up to the first that is not known for sure; none of tokens that are not its text.

        Tokens by which the server ends an answer are known from then on.
        """
        ids = [self._id(token) for token in answer.tokens]
        known = ids[: ids.index(None)] if None in ids else ids
        whole = [i for i in known if i is not None]
        if len(whole) == len(ids):
            if self.decode(whole).strip(UNSURE) != answer.text.strip(UNSURE):
                return []
            if answer.is_ended and whole and whole[-1] in self._tokenizer.all_special_ids:
                self.ends.add(whole[-1])
        steps: list[TopTokens] = []
        for own, top in zip(whole, answer.tops, strict=False):
            if len(top) < num_tops or own not in (shown := self._by_id(top)):
                break
            steps.append(TopTokens(shown, self._most_of_others(top), own))
        return steps

    def _by_id(self, top: dict[str, float]) -> dict[int, float]:
        named = {self._id(text): logprob for text, logprob in top.items()}
        return {token: logprob for token, logprob in named.items() if token is not None}

    def _most_of_others(self, top: dict[str, float]) -> float:
        """What is shown and not known may be any token."""
        return max(min(top.values()), *(value for text, value in top.items() if self._id(text) is None), -float("inf"))

    def _id(self, text: str) -> int | None:
        number = text.removeprefix(BY_ID)
        return int(number) if text.startswith(BY_ID) and number.isdecimal() else self._ids.get(text)

    @cached_property
    def _ids(self) -> dict[str, int | None]:
        texts = self._tokenizer.batch_decode([[i] for i in range(len(self._tokenizer))])
        ids: dict[str, int | None] = {}
        for i, text in enumerate(texts):
            ids[text] = None if text in ids or BROKEN in text else i
        return ids
