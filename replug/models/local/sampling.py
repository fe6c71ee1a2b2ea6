"""Many answers drawn side by side, each by draws of its own. R answers under way, V tokens in the vocabulary.

A draw is one number between 0 and 1 for each token of a sample. It follows from the seed, the prompt and the number of
the sample, and from nothing else in the call. Which token it means follows from the distribution: that whose share of
the cumulated probabilities it falls into, so rounding changes a token only where the draw lies on a border.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from replug.models.generation import Sampled, SamplingOptions, Stop, before_stop

# The nucleus is sought among so many likeliest tokens before all are sorted, which takes ten times as long.
LIKELIEST_TOKENS = 512


class Branches(Protocol):
    """Answers under way, each after its prompt; `logits` [R, V] are those of the token after each."""

    logits: Tensor

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """Make the answers `kept` (their numbers among those under way) longer by a token each; the others are done."""
        ...


@dataclass(slots=True)
class _Answer:
    """One under way. `text` ends before the stop."""

    draws: np.ndarray
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""

    def take(
        self, token: int, logprob: float, ends: frozenset[int], decode: Callable[[list[int]], str], stop: Stop
    ) -> bool:
        """Whether the answer goes on after this token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        is_end = token in ends
        whole = decode(self.ids[:-1] if is_end else self.ids)  # all of it: a token may hold a part of a character
        self.text = before_stop(whole, stop)
        return not is_end and self.text == whole and len(self.ids) < len(self.draws)


def draw_answers(
    branches: Branches,
    draws: Sequence[np.ndarray],
    ends: frozenset[int],
    decode: Callable[[list[int]], str],
    options: SamplingOptions,
) -> list[Sampled]:
    """An answer of each branch, by its draws."""
    answers = [_Answer(some) for some in draws]
    alive = answers
    while True:
        logprobs = branches.logits.float().log_softmax(-1)
        drawn = np.array([answer.draws[len(answer.ids)] for answer in alive])
        tokens = choose_tokens(logprobs, torch.from_numpy(drawn), options.temperature, options.top_p)
        said = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
        chosen = list(zip(alive, tokens.tolist(), said, strict=True))
        kept = [
            row
            for row, (answer, token, logprob) in enumerate(chosen)
            if answer.take(token, logprob, ends, decode, options.stop)
        ]
        if not kept:
            break
        branches.append([chosen[row][1] for row in kept], kept)
        alive = [alive[row] for row in kept]
    return [Sampled(answer.text, np.array(answer.logprobs, dtype=np.float32)) for answer in answers]


def draws_of(prompt: str, options: SamplingOptions) -> list[np.ndarray]:
    """Of each sample float64 [max_new_tokens], each from 0 to below 1."""
    seeds = [options.draw_seed(prompt, number) for number in range(options.num_samples)]
    return [np.random.default_rng(seed).random(options.max_new_tokens) for seed in seeds]


def choose_tokens(logprobs: Tensor, drawn: Tensor, temperature: float, top_p: float) -> Tensor:
    """Tokens [R] by log-probs [R, V] and draws [R]: at temperature 0 the likeliest, and the first of equals."""
    if temperature == 0:
        return logprobs.argmax(-1)
    drawn = drawn.to(logprobs.device)
    whole = (logprobs / temperature).logsumexp(-1, keepdim=True)
    if top_p == 1:
        return _by_draw(_shares(logprobs, temperature, whole), drawn)
    some, tokens = logprobs.topk(min(LIKELIEST_TOKENS, logprobs.shape[1]), dim=-1)
    likeliest = _shares(some, temperature, whole)
    if bool((likeliest.sum(-1) < top_p).any()):
        some, tokens = logprobs.sort(dim=-1, descending=True, stable=True)
        likeliest = _shares(some, temperature, whole)
    before = likeliest.cumsum(-1) - likeliest  # what the likelier ones hold: 0 for the first, which always stays
    return tokens.gather(1, _by_draw(likeliest * (before < top_p), drawn)[:, None]).squeeze(1)


def _shares(logprobs: Tensor, temperature: float, whole: Tensor) -> Tensor:
    """Float64 shares of the tempered distribution, whose logsumexp is `whole` [R, 1]."""
    return (logprobs.double() / temperature - whole).exp()


def _by_draw(shares: Tensor, drawn: Tensor) -> Tensor:
    """Places [R] into whose part of the cumulated shares [R, N] a draw falls; a share of 0 has none."""
    reached = shares.cumsum(-1)
    whole = reached[:, -1:]
    places = torch.searchsorted(reached, drawn[:, None] * whole, right=True)
    last = (reached < whole).sum(-1, keepdim=True)  # rounding may put a draw on the end of all
    return torch.minimum(places, last).squeeze(1)
