"""One answer from several prompts of a server, which shows answers and a few likeliest tokens, and no distributions.

With the server's tokenizer it is decoded token by token, as local weights do it (REPLUG, section 3.2). Each prompt's
own greedy answer comes with the likeliest tokens at each place, and holds as long as the mixture chooses the same; a
prompt that would have gone on otherwise is asked again. Where the shown tokens do not settle the choice, the tokens in
question are scored after every prompt: a token that is not shown is at most as likely as the least of those shown.
Else every prompt's own whole answer is scored after every prompt, and the likeliest one by the mixture is the answer.
Weights follow the tokens that were chosen, and a prompt of no weight is asked no further.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from replug.models.black_box_lm import Mixture
from replug.models.ensemble import MovingWeights, mix_and_weigh
from replug.models.generation import Generated, GenerationOptions, before_stop, stop_texts
from replug.models.http.completions_api import BROKEN, Pair, ServerText, num_tops
from replug.models.pair_tokens import PairIds, answer_text, control_tokens

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

    from replug.models.http.http_lm import HttpLM


BY_ID = "token_id:"
UNSURE = f"{BROKEN} "  # at the ends of an answer: a part of a character, and a blank that some decoders drop


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The shown part of a next-token distribution: log-probs (nats) by id, and the most of any other token.

    `own` is the likeliest, with which the part itself goes on.
    """

    logprobs: Mapping[int, float]
    most_of_others: float
    own: int


def contenders(parts: Sequence[TopTokens], weights: Sequence[float] | np.ndarray) -> list[int]:
    """Return the shown tokens that may be the mixture's likeliest, the likeliest so far first, then by lower id."""
    shown = sorted({token for part in parts for token in part.logprobs})
    least = {token: _probability(parts, weights, token, others=False) for token in shown}
    best = max(least.values())
    some = [token for token in shown if _probability(parts, weights, token, others=True) >= best]
    return sorted(some, key=lambda token: -least[token])


def _probability(parts: Sequence[TopTokens], weights: Sequence[float] | np.ndarray, token: int, others: bool) -> float:
    """Return the least probability by what is shown; with `others` the largest possible."""
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

    def decode(self, ids: list[int], last: int | None = None) -> str:
        """Decode an answer behind the last token of its prompt, as local weights do."""
        return answer_text(self._tokenizer, ids, last)

    def control_tokens(self, names: Sequence[str]) -> frozenset[int]:
        """Return the control tokens among names."""
        return control_tokens(self._tokenizer, names)

    def steps(self, answer: ServerText, num_tops: int) -> list[TopTokens]:
        """Return an answer's tokens up to the first that is not known for sure; none of tokens that are not its text.

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
            named = {self._id(text): logprob for text, logprob in top.items()}
            shown = {token: logprob for token, logprob in named.items() if token is not None}
            if len(top) < num_tops or own not in shown:
                break
            unknown = [logprob for text, logprob in top.items() if self._id(text) is None]  # each may be any token
            steps.append(TopTokens(shown, max(min(top.values()), *unknown, -math.inf), own))
        return steps

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


MOST_CONTENDERS = 16  # tokens that are scored after every prompt; more are a distribution that so few do not settle


class ServerMixture:
    """The answer of a server to the prompts [K] of a mixture."""

    def __init__(self, lm: "HttpLM", prompts: list[Pair], mixture: Mixture, options: GenerationOptions) -> None:
        self._lm, self._prompts, self._mixture, self._options = lm, prompts, mixture, options
        self._num_tops = num_tops(lm.api)
        self._read: np.ndarray | None = None

    async def find(self) -> Generated:
        """Return the mixture's answer. Raises as the server's calls do."""
        self._read = await self._read_logprobs()
        shown, prompt_tokens = await self._lm.show(self._prompts, self._options.max_new_tokens)
        if self._lm.names and (answer := await self._token_by_token(self._lm.names, shown)):
            return replace(answer, prompt_tokens=prompt_tokens)
        return await self._whole(shown, prompt_tokens)

    async def _read_logprobs(self) -> np.ndarray | None:
        """Return log-probs [K, N] of the prompts' last tokens that move the weights; None where none do."""
        if not self._mixture.read:
            return None
        ids = [self._ids(place) for place in range(len(self._prompts))]
        if not (num_read := self._mixture.num_read(ids)):
            return None
        pairs = [Pair(row, "", "", (one[:-num_read], one[-num_read:])) for row, one in enumerate(ids)]
        return np.stack([score.token_logprobs for score in await self._lm.score_pairs(pairs)])

    async def _token_by_token(self, names: TokenNames, shown: Sequence[ServerText]) -> Generated | None:
        """Return the answer; None where a choice cannot be known."""
        moving = self._mixture.moving(self._read)
        plans = {place: deque(names.steps(answer, self._num_tops)) for place, answer in enumerate(shown)}
        chosen: list[int] = []
        logprobs: list[float] = []
        last, ends = self._ids(0)[-1], names.control_tokens(stop_texts(self._options.stop))
        while True:
            plans = {place: plans[place] for place in np.flatnonzero(moving.log_weights > -np.inf).tolist()}
            if not await self._plan(names, plans, chosen):
                return None
            choice = await self._choose({place: plan[0] for place, plan in plans.items()}, moving, chosen)
            if choice is None:
                return None
            chosen.append(choice[0])
            logprobs.append(choice[1])
            is_end = chosen[-1] in names.ends | ends
            text = names.decode(chosen[:-1] if is_end else chosen, last)
            answer = before_stop(text, self._options.stop)
            if is_end or answer != text or len(chosen) == self._options.max_new_tokens:
                return Generated(answer, np.array(logprobs, dtype=np.float32), weights=moving.weights)
            for plan in plans.values():
                if plan.popleft().own != chosen[-1]:
                    plan.clear()

    async def _plan(self, names: TokenNames, plans: Mapping[int, deque[TopTokens]], chosen: list[int]) -> bool:
        """Ask the prompts whose own answers have ended, or were others; return whether all have a next token now."""
        empty = [place for place, plan in plans.items() if not plan]
        if empty and chosen:
            longer = [self._longer(row, place, chosen, []) for row, place in enumerate(empty)]
            shown, _ = await self._lm.show(longer, self._options.max_new_tokens - len(chosen))
            for place, answer in zip(empty, shown, strict=True):
                plans[place].extend(names.steps(answer, self._num_tops))
        return all(plans.values())

    async def _choose(
        self, parts: Mapping[int, TopTokens], moving: MovingWeights, chosen: list[int]
    ) -> tuple[int, float] | None:
        """Return the mixture's likeliest token and its log-prob, exactly; None where it cannot be known.

        `parts` are those of the prompts with a weight, by place. The token moves the weights.
        """
        weights = moving.weights[list(parts)]
        some = contenders(list(parts.values()), weights)
        if len(some) > MOST_CONTENDERS:
            return None
        wanted = [(place, token) for token in some for place, part in parts.items() if token not in part.logprobs]
        if wanted:
            pairs = [self._longer(row, place, chosen, [token]) for row, (place, token) in enumerate(wanted)]
            found = {place: dict(part.logprobs) for place, part in parts.items()}
            for (place, token), score in zip(wanted, await self._lm.score_pairs(pairs), strict=True):
                found[place][token] = score.sum_logprob
            parts = {place: replace(part, logprobs=found[place]) for place, part in parts.items()}
            some = contenders(list(parts.values()), weights)
        mass = _probability(list(parts.values()), weights, some[0], others=False)
        unseen = float(np.dot(weights, np.exp([part.most_of_others for part in parts.values()])))
        if unseen >= mass:
            return None
        given = np.zeros(len(self._prompts))
        given[list(parts)] = [part.logprobs[some[0]] for part in parts.values()]  # all parts show the token now
        return some[0], moving.see(given)

    def _longer(self, row: int, place: int, chosen: list[int], after: list[int]) -> Pair:
        """Return a prompt with the tokens chosen so far behind it, and those to score after these."""
        return Pair(row, "", "", ([*self._ids(place), *chosen], after))

    def _ids(self, place: int) -> list[int]:
        """Return the ids of a prompt."""
        ids: PairIds | None = self._prompts[place].ids
        assert ids is not None, "token by token wants the server's tokenizer"
        return ids[0]

    async def _whole(self, shown: Sequence[ServerText], prompt_tokens: int | None) -> Generated:
        """Return the likeliest whole answer, with one log-prob for all of it."""
        candidates, count = _candidates(shown, self._options), len(self._prompts)
        mixture, weights = self._mixture, self._mixture.moving(self._read).weights
        if not candidates:  # nothing was generated after any prompt
            return Generated("", np.empty(0, dtype=np.float32), None, weights, prompt_tokens)
        rows = [(prompt.prefix, scored) for _, scored in candidates for prompt in self._prompts]
        scores = await self._lm.score_pairs([self._lm.pair(row, *texts) for row, texts in enumerate(rows)])
        given = [
            np.stack([score.token_logprobs for score in scores[start : start + count]])
            for start in range(0, len(scores), count)
        ]
        mixed = [mix_and_weigh(one, mixture.log_prior, mixture.share, mixture.prune, self._read) for one in given]
        sums = [logprobs.sum() for logprobs, _ in mixed]
        best = int(np.argmax(sums))
        whole, weights = np.array([sums[best]], dtype=np.float32), mixed[best][1]
        num_tokens = given[best].shape[1]
        return Generated(candidates[best][0], whole, None, weights[:, -1], prompt_tokens, answer_tokens=num_tokens)


def _candidates(shown: Sequence[ServerText], options: GenerationOptions) -> list[tuple[str, str]]:
    """Return each different answer (white space round it aside) in the first prompt's form, and what is scored of it.

    An answer is scored with the stop that ended it, or with one where the server itself ended it.
    """
    by_text: dict[str, tuple[str, str]] = {}
    stops = stop_texts(options.stop)
    for answer in shown:
        text = before_stop(answer.text, options.stop)
        rest, ending = answer.text[len(text) :], stops[0] if stops and answer.is_ended else ""
        if rest:
            ending = min((one for one in stops if rest.startswith(one)), key=len)  # the one that was complete first
        if scored := text + ending:
            by_text.setdefault(text.strip(), (text, scored))
    return list(by_text.values())
