"""Decoding of answers to mixtures of prompts, token by token and side by side (REPLUG, section 3.2).

Probabilities are mixed, never logits. A temperature divides the mixture's log-probs, since a mixture of tempered
distributions would be another model. An answer depends on its prompts, weights and options alone, not on the other
answers in its passes: it has a separate random generator, and leaves the passes when it ends. Weights follow the chosen
tokens, and a prompt of weight 0 leaves the passes. A sample after one prompt is a mixture of that prompt. K prompts of
an answer, V tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replug.models.black_box_lm import Mixture
from replug.models.generation import Generated, GenerationOptions, before_stop, by_text

if TYPE_CHECKING:  # seconds to import
    from replug.models.local.decoding import GrowingPrompts

# The nucleus is searched among these likeliest tokens first: sorting all takes ten times the time.
LIKELIEST_TOKENS = 512


def mix_next_token(logits: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs (nats, float32) of the mixture [V] and given each prompt [K, V].

    Takes logits [K, V] and log weights [K] of a distribution.
    """
    given = logits.float().log_softmax(-1)
    return torch.logsumexp(given + log_weights.float()[:, None], 0), given


def entropy(logprobs: Tensor) -> float:
    """Return the entropy in nats of a distribution with log-probs [V]. Impossible tokens add nothing."""
    least = torch.finfo(logprobs.dtype).min  # 0 times minus infinity is not a number
    return max(0.0, -float((logprobs.exp() * logprobs.clamp(min=least)).sum()))


class TokenChooser:
    """Chooser of tokens by the options; its draws depend on the seed and the distributions alone."""

    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)  # on the CPU: the same draws on every device

    def choose(self, logprobs: Tensor) -> int:
        """Return a token, given log-probs [V] of any scale: at temperature 0 the likeliest, the first of equals."""
        if self._options.temperature == 0:
            return int(logprobs.argmax())
        tempered = (logprobs.double().cpu() / self._options.temperature).softmax(-1)
        return int(torch.multinomial(nucleus(tempered, self._options.top_p), 1, generator=self._generator))


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return probabilities [V], 0 outside of the fewest likeliest tokens that hold `top_p`. Not normalized."""
    if top_p == 1:
        return probabilities
    least = probabilities.topk(min(LIKELIEST_TOKENS, len(probabilities))).values[-1]
    places = (probabilities >= least).nonzero().squeeze(1)
    if probabilities[places].sum() < top_p:
        places = torch.arange(len(probabilities))
    ordered, order = probabilities[places].sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered  # sum of the likelier tokens: 0 for the first, which always stays
    return torch.zeros_like(probabilities).scatter(0, places[order], ordered * (before < top_p))


class MixedAnswer:
    """An unfinished answer to the token ids `rows` [K] of its prompts; `text` ends before the stop.

    `goes_on` is called with the text after each token, and returns False to end the answer.
    """

    def __init__(
        self,
        rows: list[list[int]],
        mixture: Mixture,
        options: GenerationOptions,
        ends: frozenset[int],
        decode: Callable[[list[int]], str],
        goes_on: Callable[[str], bool] | None = None,
    ) -> None:
        self.rows, self.options, self._mixture = rows, options, mixture
        self.num_read = mixture.num_read(rows)  # tokens at the prompts' end that move the weights
        self._ends, self._decode, self._goes_on = ends, decode, goes_on
        self.begin()

    def begin(self) -> None:
        """Start the answer from its first token, again if need be."""
        self.text, self._chooser = "", TokenChooser(self.options)
        self._moving, self._read = self._mixture.moving(), np.ones(len(self.rows), dtype=bool)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._tops: dict[str, float] = {}

    def read(self, token_logprobs: Sequence[Tensor]) -> None:
        """Move the weights by log-probs [K][num_read] of the prompts' last tokens."""
        self._moving = self._mixture.moving(torch.stack(list(token_logprobs)).double().cpu().numpy())

    @property
    def last_token(self) -> int:
        return self._ids[-1]

    def take(self, logits: Tensor) -> list[bool]:
        """Choose a token by the logits after the prompts still read; return for each whether it is read further.

        All are False if the answer has ended.
        """
        read = self._read
        mixed, given = mix_next_token(logits, torch.from_numpy(self._moving.log_weights[read]).to(logits.device))
        if self.options.num_tops and not self._ids:
            values, tokens = mixed.topk(min(self.options.num_tops, len(mixed)))
            self._tops = by_text(zip(map(self._decode, tokens[:, None].tolist()), values.tolist(), strict=True))
        self._ids.append(self._chooser.choose(mixed))
        seen = np.zeros(len(read))
        seen[read] = given[:, self.last_token].double().cpu()
        self._moving.see(seen)
        self._read = self._moving.log_weights > -np.inf
        self._logprobs.append(float(mixed[self.last_token]))
        self._entropies.append(entropy(mixed))
        is_end = self.last_token in self._ends
        whole = self._decode(self._ids[:-1] if is_end else self._ids)  # a token may hold a part of a character
        self.text = before_stop(whole, self.options.stop)
        goes_on = (
            self.is_wanted() and not is_end and self.text == whole and len(self._ids) < self.options.max_new_tokens
        )
        return [goes_on and bool(does) for does in self._read[read]]

    def is_wanted(self) -> bool:
        """Return whether the caller still waits for the answer."""
        return self._goes_on is None or self._goes_on(self.text)

    def generated(self) -> Generated:
        token_logprobs, token_entropies = np.array([self._logprobs, self._entropies], dtype=np.float32)
        prompt_tokens = sum(map(len, self.rows))
        weights = self._moving.weights
        return Generated(self.text, token_logprobs, token_entropies, weights, prompt_tokens, tops=self._tops)


def continue_answers(prompts: "GrowingPrompts", answers: Sequence[MixedAnswer]) -> Iterator[None]:
    """Extend all answers by a token at a time until each has ended; yields after each token.

    `prompts` are the prompts of the first answer, then of the second, and so on.
    """
    alive, counts = list(answers), [len(answer.rows) for answer in answers]
    if any(answer.num_read for answer in answers):
        ends = iter(prompts.ends)
        for answer, count in zip(answers, counts, strict=True):
            answer.read([next(ends) for _ in range(count)])
    while True:
        parts = prompts.logits.split(counts)
        read_on = [answer.take(logits) for answer, logits in zip(alive, parts, strict=True)]
        yield
        owners = [answer for answer, count in zip(alive, counts, strict=True) for _ in range(count)]
        kept = [row for row, does in enumerate(chain(*read_on)) if does]
        if not kept:
            return
        prompts.append([owners[row].last_token for row in kept], kept)
        alive = [answer for answer, some in zip(alive, read_on, strict=True) if any(some)]
        counts = [sum(some) for some in read_on if any(some)]
