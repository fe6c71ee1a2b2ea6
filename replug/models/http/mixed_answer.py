"""One answer from several prompts of a server, which shows answers and a few likeliest tokens, and no distributions.

Token by token, as local weights choose it (REPLUG, section 3.2): each prompt's own greedy answer comes with the
likeliest tokens at each place, and holds as long as the mixture chooses the same; a prompt that would have gone on
otherwise is asked again. Where those few tokens do not settle the mixture's choice, the tokens in question are scored
after every prompt. That needs the server's tokenizer.

Else whole answers: every prompt's own answer is a candidate, and each is scored after every prompt. Its probability is
that of the mixture at each of its tokens, up to the stop. The likeliest candidate is the answer.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from replug.models.black_box_lm import ContinuationScore
from replug.models.ensemble import mix_token_logprobs
from replug.models.generation import Generated, GenerationOptions, Stop, before_stop, stop_texts
from replug.models.http.completions_api import Pair, ShownAnswer, ShownAnswers
from replug.models.http.top_tokens import TokenNames, TopTokens, contenders, is_likeliest, mixed_logprob, not_shown
from replug.models.pair_tokens import PairIds

MOST_CONTENDERS = 16  # tokens that are scored after every prompt; more are a distribution that so few do not settle


@dataclass(frozen=True, slots=True)
class ServerCalls:
    """What is asked of the server, each in order: answers of so many tokens with `num_tops` likeliest, and scores."""

    show: Callable[[Sequence[Pair], int], Awaitable[ShownAnswers]]
    score: Callable[[list[Pair]], Awaitable[list[ContinuationScore]]]
    pair: Callable[[int, str, str], Pair]
    names: TokenNames | None
    num_tops: int


@dataclass(frozen=True, slots=True)
class ServerMixture:
    """The answer of prompts [K], of which `weights` [K] sum to 1."""

    server: ServerCalls
    prompts: Sequence[Pair]
    weights: Sequence[float]
    options: GenerationOptions

    async def find(self) -> Generated:
        """Return the mixture's answer. Raises as the server's calls do."""
        shown = await self.server.show(self.prompts, self.options.max_new_tokens)
        if self.server.names and (answer := await self._token_by_token(self.server.names, shown.answers)):
            text, logprobs = answer
            chosen = np.array(logprobs, dtype=np.float32)
            return Generated(text, chosen, None, len(self.prompts), shown.prompt_tokens)
        return await self._whole(shown)

    async def _token_by_token(self, names: TokenNames, shown: Sequence[ShownAnswer]) -> tuple[str, list[float]] | None:
        """The answer and its tokens' log-probs; None where a choice cannot be known."""
        plans = [deque(names.steps(answer, self.server.num_tops)) for answer in shown]
        chosen: list[int] = []
        logprobs: list[float] = []
        while True:
            if not await self._plan(names, plans, chosen):
                return None
            choice = await self._choose([plan[0] for plan in plans], chosen)
            if choice is None:
                return None
            chosen.append(choice[0])
            logprobs.append(choice[1])
            is_end = chosen[-1] in names.ends
            text = names.decode(chosen[:-1] if is_end else chosen)
            answer = before_stop(text, self.options.stop)
            if is_end or answer != text or len(chosen) == self.options.max_new_tokens:
                return answer, logprobs
            for plan in plans:
                if plan.popleft().own != chosen[-1]:
                    plan.clear()

    async def _plan(self, names: TokenNames, plans: list[deque[TopTokens]], chosen: list[int]) -> bool:
        """Ask the prompts whose own answers have ended, or were others; whether all have a next token now."""
        empty = [place for place, plan in enumerate(plans) if not plan]
        if empty and chosen:
            longer = [self._longer(row, place, chosen, []) for row, place in enumerate(empty)]
            shown = await self.server.show(longer, self.options.max_new_tokens - len(chosen))
            for place, answer in zip(empty, shown.answers, strict=True):
                plans[place].extend(names.steps(answer, self.server.num_tops))
        return all(plans)

    async def _choose(self, parts: Sequence[TopTokens], chosen: list[int]) -> tuple[int, float] | None:
        """The mixture's likeliest token and its log-prob, exactly; None where it cannot be known."""
        some = contenders(parts, self.weights)
        if len(some) > MOST_CONTENDERS:
            return None
        if wanted := not_shown(parts, some):
            parts = await self._scored(parts, wanted, chosen)
            some = contenders(parts, self.weights)
        if not is_likeliest(parts, self.weights, some[0]):
            return None
        return some[0], mixed_logprob(parts, self.weights, some[0])

    async def _scored(
        self, parts: Sequence[TopTokens], wanted: Sequence[tuple[int, int]], chosen: list[int]
    ) -> list[TopTokens]:
        pairs = [self._longer(row, place, chosen, [token]) for row, (place, token) in enumerate(wanted)]
        found: list[dict[int, float]] = [{} for _ in parts]
        for (place, token), score in zip(wanted, await self.server.score(pairs), strict=True):
            found[place][token] = score.sum_logprob
        return [part.with_scores(of) for part, of in zip(parts, found, strict=True)]

    def _longer(self, row: int, place: int, chosen: list[int], after: list[int]) -> Pair:
        """A prompt with the tokens chosen so far behind it, and what is to be scored after these."""
        ids: PairIds | None = self.prompts[place].ids
        assert ids is not None, "token by token wants the server's tokenizer"
        return Pair(row, "", "", ([*ids[0], *chosen], after))

    async def _whole(self, shown: ShownAnswers) -> Generated:
        """The likeliest whole answer, with one log-prob for all of it."""
        candidates, count = _candidates(shown.answers, self.options), len(self.prompts)
        if not candidates:  # nothing was generated after any prompt
            return Generated("", np.empty(0, dtype=np.float32), None, count, shown.prompt_tokens)
        rows = [(prompt.prefix, candidate.scored) for candidate in candidates for prompt in self.prompts]
        scores = await self.server.score([self.server.pair(row, *texts) for row, texts in enumerate(rows)])
        mixed = [self._mix(scores[start : start + count]) for start in range(0, len(scores), count)]
        best = max(range(len(mixed)), key=lambda place: float(mixed[place].sum()))
        whole = np.array([mixed[best].sum()], dtype=np.float32)
        text, num_tokens = candidates[best].text, len(mixed[best])
        return Generated(text, whole, None, count, shown.prompt_tokens, answer_tokens=num_tokens)

    def _mix(self, scores: Sequence[ContinuationScore]) -> np.ndarray:
        """Log-probs [T] of the mixture."""
        with np.errstate(divide="ignore"):  # a weight of 0 is a log weight of minus infinity
            log_weights = np.log(np.asarray(self.weights, dtype=np.float64))
        return mix_token_logprobs(np.stack([score.token_logprobs for score in scores]), log_weights)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer, and what is scored of it: with the stop behind it where it has ended."""

    text: str
    scored: str


def _candidates(shown: Sequence[ShownAnswer], options: GenerationOptions) -> list[WholeAnswer]:
    """Each different answer once, but for white space round it; the first prompt's form of it."""
    by_text: dict[str, WholeAnswer] = {}
    for answer in shown:
        text = before_stop(answer.text, options.stop)
        if scored := text + _ending(answer, text, options.stop):
            by_text.setdefault(text.strip(), WholeAnswer(text, scored))
    return list(by_text.values())


def _ending(answer: ShownAnswer, text: str, stop: Stop) -> str:
    """The stop that ended an answer, or one for the end that the server itself made; nothing where length ended it."""
    stops, rest = stop_texts(stop), answer.text[len(text) :]
    if rest:
        return min((one for one in stops if rest.startswith(one)), key=len)  # the one that was complete first
    return stops[0] if stops and answer.is_ended else ""
