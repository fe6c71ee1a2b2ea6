"""Answers of mixtures of prompts, token by token, as many mixtures side by side as are asked for (REPLUG, section 3.2).

A mixture's answer follows from its prompts, weights and options alone, whatever else is decoded in its passes: it has
draws of its own, and leaves the others when it ends. K prompts of a mixture, V tokens in the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replug.models.generation import Generated, GenerationOptions, before_stop
from replug.models.local.next_token import TokenChooser, entropy, mix_next_token
from replug.models.local.sampling import Branches


@dataclass(frozen=True, slots=True)
class TokenMixture:
    """The tokens of K prompts, and their weights, which sum to 1.

    `goes_on` is told the answer's text after each of its tokens, and ends it by False.
    """

    rows: list[list[int]]
    weights: Sequence[float]
    goes_on: Callable[[str], bool] | None = None


class MixedAnswer:
    """An answer under way; `text` ends before the stop."""

    def __init__(
        self,
        mixture: TokenMixture,
        ends: frozenset[int],
        decode: Callable[[list[int]], str],
        options: GenerationOptions,
    ) -> None:
        self.num_prompts, self.text = len(mixture.rows), ""
        self._prompt_tokens = sum(map(len, mixture.rows))
        self._log_weights = torch.tensor(mixture.weights, dtype=torch.float64).log()
        self._ends, self._decode, self._options = ends, decode, options
        self._goes_on = mixture.goes_on
        self._chooser = TokenChooser(options)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []

    @property
    def last_token(self) -> int:
        return self._ids[-1]

    def take(self, logits: Tensor) -> bool:
        """Choose a token by the logits [K, V] after the prompts; whether the answer goes on behind it."""
        mixed = mix_next_token(logits, self._log_weights.to(logits.device))
        self._ids.append(self._chooser.choose(mixed))
        self._logprobs.append(float(mixed[self.last_token]))
        self._entropies.append(entropy(mixed))
        is_end = self.last_token in self._ends
        whole = self._decode(self._ids[:-1] if is_end else self._ids)  # a token may hold a part of a character
        self.text = before_stop(whole, self._options.stop)
        is_wanted = self._goes_on is None or self._goes_on(self.text)
        return is_wanted and not is_end and self.text == whole and len(self._ids) < self._options.max_new_tokens

    def generated(self) -> Generated:
        said, unsure = np.array([self._logprobs, self._entropies], dtype=np.float32)
        return Generated(self.text, said, unsure, self.num_prompts, self._prompt_tokens)


def continue_answers(prompts: Branches, answers: Sequence[MixedAnswer]) -> Iterator[None]:
    """Lengthen each answer until it ends, a token of all at a time; yields after each.

    `prompts` are those of the first answer, then those of the second, and so on.
    """
    alive = list(answers)
    while True:
        parts = prompts.logits.split([answer.num_prompts for answer in alive])
        goes_on = [answer.take(logits) for answer, logits in zip(alive, parts, strict=True)]
        yield
        owner = [number for number, answer in enumerate(alive) for _ in range(answer.num_prompts)]
        kept = [row for row, number in enumerate(owner) if goes_on[number]]
        if not kept:
            return
        prompts.append([alive[owner[row]].last_token for row in kept], kept)
        alive = [answer for answer, does in zip(alive, goes_on, strict=True) if does]
