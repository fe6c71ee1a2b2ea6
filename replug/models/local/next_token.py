"""The next token of a mixture of distributions: REPLUG at inference (section 3.2). Pure functions of tensors.

K prompts, V tokens in the vocabulary. Probabilities are mixed, never logits. A temperature is applied to the mixture,
since a mixture of tempered distributions would be another model.
"""

import torch
from torch import Tensor

from replug.models.generation import GenerationOptions


def mix_next_token(logits: Tensor, log_weights: Tensor) -> Tensor:
    """Log-probs (nats, float32 [V]) of the mixture, from logits [K, V] and log weights [K], whose exp sums to 1."""
    return torch.logsumexp(logits.float().log_softmax(-1) + log_weights.float()[:, None], 0)


def entropy(logprobs: Tensor) -> float:
    """Nats, of a distribution given by its log-probs [V]. What has no probability adds nothing."""
    least = torch.finfo(logprobs.dtype).min  # 0 times minus infinity is no number
    return max(0.0, -float((logprobs.exp() * logprobs.clamp(min=least)).sum()))


class TokenChooser:
    """Chooses token after token as the options say; what it draws follows from the seed and the distributions."""

    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)  # on the CPU: the same draws on every device

    def choose(self, logprobs: Tensor) -> int:
        """A token, given log-probs [V] of any scale. At temperature 0 the likeliest, and the first of equals."""
        if self._options.temperature == 0:
            return int(logprobs.argmax())
        tempered = (logprobs.double().cpu() / self._options.temperature).softmax(-1)
        return int(torch.multinomial(nucleus(tempered, self._options.top_p), 1, generator=self._generator))


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Probabilities [V], 0 outside of the fewest likeliest tokens that hold `top_p` of the whole. Not normalized."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered  # what the likelier ones hold: 0 for the first, which always stays
    return torch.zeros_like(probabilities).scatter(0, order, ordered * (before < top_p))
