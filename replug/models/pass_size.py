"""How many tokens an LM reads in one pass, and a replica in one call, where no key says otherwise. Imports no torch.

A CPU is busy with few tokens, and few rows of similar length are padded little. A GPU wants enough arithmetic in a pass
to hide what launching it costs: 7 ms of a core for GPT-2 XL's 48 layers, whatever their width. Beyond that a larger
unit only means fewer of them, and replicas that wait for the last one of a step. So a GPU's units follow from the LM's
size. They never follow from the number of replicas: a resumed run may have another, and its numbers stay the same.
"""

import math
from dataclasses import dataclass

TOKENS_PER_PASS = 1024  # on a CPU
PASSES_PER_UNIT = 8  # of a CPU: an LM sorts its unit by length, which bytes only guess

# Matrix products of a unit on a GPU: at half of their peaks a fortieth of a second of an H100, a twelfth of an A100.
FLOP_PER_UNIT_GPU = 12e12
FEWEST_TOKENS_GPU, MOST_TOKENS_GPU = 4096, 16_384
# That fit where nothing is padded, so that a unit is one pass where its texts have more tokens than their bytes say.
# Padded ones are better two passes then, of the longer rows and of the shorter.
UNITS_PER_PASS_GPU = 2


@dataclass(frozen=True, slots=True)
class LMShape:
    """Layers of a decoder and the width of its hidden states; of a stand-in 1 and 1."""

    layers: int = 1
    hidden: int = 1

    @property
    def flop_per_token(self) -> float:
        """A layer has about 12 weights for each pair of hidden numbers."""
        return 2.0 * 12 * self.layers * self.hidden**2


def tokens_per_pass(shape: LMShape, on_gpu: bool, tokens_per_batch: int | None = None, packed: bool = True) -> int:
    """At most; `tokens_per_batch` is the user's."""
    of_gpu = (UNITS_PER_PASS_GPU if packed else 1) * _tokens_per_unit_gpu(shape)
    return tokens_per_batch or (of_gpu if on_gpu else TOKENS_PER_PASS)


def tokens_per_unit(shape: LMShape, on_gpu: bool, tokens_per_batch: int | None = None) -> int:
    """Tokens of one call to a replica: a pass on a GPU, several on a CPU."""
    if on_gpu:
        return tokens_per_batch or _tokens_per_unit_gpu(shape)
    return PASSES_PER_UNIT * (tokens_per_batch or TOKENS_PER_PASS)


def _tokens_per_unit_gpu(shape: LMShape) -> int:
    """A power of two."""
    wanted = 2 ** round(math.log2(FLOP_PER_UNIT_GPU / shape.flop_per_token))
    return min(MOST_TOKENS_GPU, max(FEWEST_TOKENS_GPU, wanted))
