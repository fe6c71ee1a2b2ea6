"""Answers of mixtures of prompts, token by token, as many side by side as memory holds (REPLUG, section 3.2).

Probabilities are mixed, never logits. A temperature divides the mixture's log-probs, since a mixture of tempered
distributions would be another model. An answer follows from its prompts, weights and options alone, whatever else is
decoded in its passes: it draws from a generator of its own, and leaves the others when it ends. A sample after one
prompt is a mixture of that prompt. K prompts of an answer, R prompts of all answers under way, V tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replug.models.generation import Generated, GenerationOptions, before_stop

if TYPE_CHECKING:  # seconds to import
    from replug.models.local.decoding import GrowingPrompts

# The nucleus is sought among so many likeliest tokens before all are sorted, which takes ten times as long.
LIKELIEST_TOKENS = 512


def mix_next_token(logits: Tensor, log_weights: Tensor) -> Tensor:
    """Return the mixture's log-probs (nats, float32 [V]) from logits [K, V] and log weights [K] of a distribution."""
    return torch.logsumexp(logits.float().log_softmax(-1) + log_weights.float()[:, None], 0)


def entropy(logprobs: Tensor) -> float:
    """Return the nats of a distribution given by its log-probs [V]. What has no probability adds nothing."""
    least = torch.finfo(logprobs.dtype).min  # 0 times minus infinity is not a number
    return max(0.0, -float((logprobs.exp() * logprobs.clamp(min=least)).sum()))


class TokenChooser:
    """Chooses token after token as the options say; its draws follow from the seed and the distributions."""

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
    before = ordered.cumsum(0) - ordered  # what the likelier ones hold: 0 for the first, which always stays
    return torch.zeros_like(probabilities).scatter(0, places[order], ordered * (before < top_p))


class MixedAnswer:
    """An answer under way to the token ids `rows` [K] of its prompts; `text` ends before the stop.

    `goes_on` is told the text after each token, and ends the answer by False.
    """

    def __init__(
        self,
        rows: list[list[int]],
        weights: Sequence[float],
        options: GenerationOptions,
        ends: frozenset[int],
        decode: Callable[[list[int]], str],
        goes_on: Callable[[str], bool] | None = None,
    ) -> None:
        self.rows, self.options = rows, options
        self._log_weights = torch.tensor(weights, dtype=torch.float64).log()
        self._ends, self._decode, self._goes_on = ends, decode, goes_on
        self.begin()

    def begin(self) -> None:
        """Begin, or begin again."""
        self.text, self._chooser = "", TokenChooser(self.options)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []

    @property
    def last_token(self) -> int:
        return self._ids[-1]

    def take(self, logits: Tensor) -> bool:
        """Choose a token by the logits [K, V] after the prompts; return whether the answer goes on behind it."""
        mixed = mix_next_token(logits, self._log_weights.to(logits.device))
        self._ids.append(self._chooser.choose(mixed))
        self._logprobs.append(float(mixed[self.last_token]))
        self._entropies.append(entropy(mixed))
        is_end = self.last_token in self._ends
        whole = self._decode(self._ids[:-1] if is_end else self._ids)  # a token may hold a part of a character
        self.text = before_stop(whole, self.options.stop)
        is_wanted = self._goes_on is None or self._goes_on(self.text)
        return is_wanted and not is_end and self.text == whole and len(self._ids) < self.options.max_new_tokens

    def generated(self) -> Generated:
        said, unsure = np.array([self._logprobs, self._entropies], dtype=np.float32)
        return Generated(self.text, said, unsure, len(self.rows), sum(map(len, self.rows)))


def continue_answers(prompts: "GrowingPrompts", answers: Sequence[MixedAnswer]) -> Iterator[None]:
    """Lengthen each answer until it ends, a token of all at a time; yields after each.

    `prompts` are those of the first answer, then those of the second, and so on.
    """
    alive = list(answers)
    while True:
        parts = prompts.logits.split([len(answer.rows) for answer in alive])
        goes_on = [answer.take(logits) for answer, logits in zip(alive, parts, strict=True)]
        yield
        owner = [number for number, answer in enumerate(alive) for _ in answer.rows]
        kept = [row for row, number in enumerate(owner) if goes_on[number]]
        if not kept:
            return
        prompts.append([alive[owner[row]].last_token for row in kept], kept)
        alive = [answer for answer, does in zip(alive, goes_on, strict=True) if does]
