"""From hidden states to the log-probabilities of tokens, without a vocabulary's worth of float32 for all of them.

Only positions that predict a token of a continuation come here. The output layer runs on a few hundred of them at a
time, and the softmax on so few that their float32 logits stay in the processor's cache: on a CPU that is four times
faster than a logsumexp over the same chunk, which is a quarter of a small LM's whole time. A half-precision LM goes
the other way: many positions and a piece of the vocabulary after another. On a CPU its float32 weights and logits stay
in cache, and on a GPU its products are aligned.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from replug.models.black_box_lm import ContinuationScore
from replug.models.hardware import HostCopy
from replug.models.local.float32_head import Float32Head
from replug.models.pair_tokens import PairIds

# Positions given to the output layer at once: enough for an efficient matrix product, little memory.
POSITIONS_PER_PRODUCT = 256
# As many where logits come in pieces of the vocabulary: each piece's weights are read once for all of them.
POSITIONS_PER_SWEEP = 1024
# Float32 logits that one softmax works on: a CPU's share of cache, and on a GPU as many as one product gives.
SOFTMAX_BYTES = {"cpu": 4 * 2**20}


def target_logprobs(rows: Tensor, target: Tensor, head: nn.Module | None) -> Tensor:
    """Float32 log-probs [N] of targets [N] given hidden states [N, D] and the output layer, or given logits [N, V].

    They are on the device of the logits, which is the output layer's where layers are spread over several.
    """
    if isinstance(head, Float32Head):
        sweeps = zip(rows.split(POSITIONS_PER_SWEEP), target.split(POSITIONS_PER_SWEEP), strict=True)
        return torch.cat([_in_pieces(some, wanted, head) for some, wanted in sweeps])
    parts = []
    for some, wanted in zip(rows.split(POSITIONS_PER_PRODUCT), target.split(POSITIONS_PER_PRODUCT), strict=True):
        parts.append(_from_logits(head(some) if head is not None else some, wanted))
    return torch.cat(parts)


def _from_logits(logits: Tensor, target: Tensor) -> Tensor:
    """Float32 log-probs [N] of targets [N] given logits [N, V] of any dtype."""
    size, target = _positions_per_softmax(logits), target.to(logits.device)
    return torch.cat(
        [
            -nn.functional.cross_entropy(some.float(), wanted, reduction="none")
            for some, wanted in zip(logits.split(size), target.split(size), strict=True)
        ]
    )


def _in_pieces(rows: Tensor, target: Tensor, head: Float32Head) -> Tensor:
    """As from all logits at once: a piece's logsumexp is one entry of the whole's. A GPU is not waited for."""
    target = target.to(head.weight.device)
    wanted, totals = torch.zeros(len(rows), device=target.device), []
    for start, logits in head.pieces(rows):
        place, last = target - start, logits.shape[1] - 1
        found = logits.gather(1, place.clamp(0, last)[:, None])[:, 0]
        wanted = torch.where((place >= 0) & (place <= last), found, wanted)
        totals.append(logits.logsumexp(1))
    return wanted - torch.stack(totals, 1).logsumexp(1)


def _positions_per_softmax(logits: Tensor) -> int:
    num_bytes = SOFTMAX_BYTES.get(logits.device.type)
    return len(logits) if num_bytes is None else max(1, num_bytes // (4 * logits.shape[1]))


def continuation_positions(pairs: Sequence[PairIds]) -> tuple[Tensor, Tensor, Tensor]:
    """Row, position and target [N] of every continuation token of right-padded (prefix, continuation) ids.

    Position t predicts token t + 1, so a continuation is predicted from one position earlier on.
    """
    counts = np.array([len(c) for _, c in pairs])
    before = np.array([len(p) for p, _ in pairs]) - (counts.cumsum() - counts)  # of its first token here, one too many
    row, num = np.repeat(np.arange(len(pairs)), counts), int(counts.sum())
    position = np.arange(num) + before[row] - 1
    target = np.fromiter(chain.from_iterable(c for _, c in pairs), np.int64, num)
    return torch.from_numpy(row), torch.from_numpy(position), torch.from_numpy(target)


class PassScores:
    """Of one pass: float32 log-probs [N], of rows with so many tokens each. Their copy to the host is under way."""

    def __init__(self, logprobs: Tensor, sizes: list[int]) -> None:
        self.copy, self.sizes = HostCopy(logprobs), sizes

    def rows(self) -> list[np.ndarray]:
        """Waits for the device."""
        return [part.numpy() for part in self.copy.tensor().split(self.sizes)]


class PendingScores:
    """Of a call: passes, and which rows of the call they hold, one after the other."""

    def __init__(self, passes: Sequence[PassScores], rows: Sequence[int]) -> None:
        self._passes, self._rows = passes, rows

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return all(one.copy.is_there() for one in self._passes)

    def result(self) -> list[ContinuationScore]:
        """In the order of the call. Any thread may wait for it. Raises what went wrong on the device."""
        logprobs = [row for one in self._passes for row in one.rows()]
        by_row = dict(zip(self._rows, logprobs, strict=True))
        return [ContinuationScore(by_row[row]) for row in range(len(by_row))]
