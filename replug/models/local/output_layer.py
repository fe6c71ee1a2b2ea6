"""From hidden states to the log-probabilities of tokens, without float32 logits of all positions at once.

Only positions that predict a token of a continuation come here. The output layer runs on a few hundred of them at a
time, and the softmax on few enough to keep their float32 logits in the processor's cache.
A half-precision LM gets an output layer with float32 logits, `Float32Head`: a logit of 20 in bfloat16 is wrong by up to
0.06, and a log-probability by 5% of the difference between documents. It replaces a linear layer in the model and
shares its weights, so later operations of the model on its logits are in float32 too.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replug.models.black_box_lm import ContinuationScore
from replug.models.hardware import HostCopy
from replug.models.pair_tokens import PairIds

log = logging.getLogger(__name__)

# Entries of the vocabulary in one product. On a CPU their weights become float32, and with their logits stay in its
# cache. A GPU's fast kernels need rows of logits that begin at a multiple of 64, which vocabularies such as 50,257 give
# only in pieces; and a sweep then has no more logits at a time than a few hundred positions of a whole vocabulary.
ENTRIES_PER_PIECE = {"cpu": 1024, "cuda": 16_384}


class Float32Head(nn.Module):
    """Hidden states [..., D] of the weight's dtype to float32 logits [..., V], under autocast too."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Return all logits; a GPU computes them in one product, since few rows need them."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        size = len(self.weight) if self.weight.device.type == "cuda" else None
        return torch.cat([logits for _, logits in self.pieces(rows, size)], 1).unflatten(0, hidden.shape[:-1])

    def pieces(self, rows: Tensor, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield float32 logits [N, P] of hidden states [N, D] by pieces of the vocabulary, each with its start.

        They are on the weight's device; a GPU computes them from half-precision weights.
        """
        rows = rows.to(self.weight.device, self.weight.dtype)  # layers may be spread over devices
        size = size or ENTRIES_PER_PIECE[rows.device.type]
        with torch.autocast(rows.device.type, enabled=False), _exact_bfloat16_products(rows):
            for start in range(0, len(self.weight), size):
                weight = self.weight[start : start + size]
                if rows.device.type == "cuda":
                    logits = torch.mm(rows, weight.T, out_dtype=torch.float32)
                else:
                    logits = torch.mm(rows.float(), weight.float().T)
                yield start, logits if self.bias is None else logits + self.bias[start : start + size].float()


def use_float32_head(model: PreTrainedModel) -> None:
    """Give a half-precision model an output layer with float32 logits; models in float32 stay unchanged."""
    head = model.get_output_embeddings()
    if head is None or head.weight.dtype not in (torch.bfloat16, torch.float16):
        return
    if type(head) is not nn.Linear:
        log.warning(
            f"the LM's output layer is a {type(head).__name__}, whose logits stay in {head.weight.dtype}: log-probs "
            "have some 0.005 nats of noise; lm.dtype=float32 has none"
        )
        return
    model.set_output_embeddings(Float32Head(head))


@contextmanager
def _exact_bfloat16_products(rows: Tensor) -> Iterator[None]:
    """Use a CPU's bfloat16 units for float32 products: exact, since the numbers are bfloat16 already.

    The setting is the process's. A scorer computes in one thread and nothing beside it.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set when torch is imported
    before = matmul.fp32_precision
    if rows.device.type == "cpu" and rows.dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def separable_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output layer, where logits are that layer of the last hidden state and nothing more.

    Models that scale or cap their logits differ; they are scored through their whole forward pass.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    probe = torch.arange(8, device=model.device)[None]
    with torch.inference_mode():
        whole = model(input_ids=probe, use_cache=False).logits
        apart = head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    # The products are the same, so only their rounding may differ. A cap of 30, as Gemma 2's, changes a logit of 1 by
    # forty times the tolerance.
    return head if whole.shape == apart.shape and torch.allclose(whole, apart.to(whole.device)) else None


# Positions given to the output layer at once: enough for an efficient matrix product, little memory.
POSITIONS_PER_PRODUCT = 256
# The same for logits in pieces of the vocabulary: each piece's weights are read once for all positions.
POSITIONS_PER_SWEEP = 1024


def target_logprobs(rows: Tensor, target: Tensor, head: nn.Module | None) -> Tensor:
    """Return float32 log-probs [N] of targets [N], given hidden states [N, D] and a head, or logits [N, V].

    They are on the device of the logits, which is the output layer's where layers are spread over several.
    """
    if isinstance(head, Float32Head):
        sweeps = zip(rows.split(POSITIONS_PER_SWEEP), target.split(POSITIONS_PER_SWEEP), strict=True)
        return torch.cat([_in_pieces(some, wanted, head) for some, wanted in sweeps])
    parts = []
    for some, wanted in zip(rows.split(POSITIONS_PER_PRODUCT), target.split(POSITIONS_PER_PRODUCT), strict=True):
        logits = (head(some) if head is not None else some).float()
        parts.append(-nn.functional.cross_entropy(logits, wanted.to(logits.device), reduction="none"))
    return torch.cat(parts)


def _in_pieces(rows: Tensor, target: Tensor, head: Float32Head) -> Tensor:
    """Return log-probs [N] by pieces of the vocabulary, combining their logsumexps. Does not wait for a GPU."""
    target = target.to(head.weight.device)
    wanted, totals = torch.zeros(len(rows), device=target.device), []
    for start, logits in head.pieces(rows):
        place, last = target - start, logits.shape[1] - 1
        values = logits.gather(1, place.clamp(0, last)[:, None])[:, 0]
        wanted = torch.where((place >= 0) & (place <= last), values, wanted)
        totals.append(logits.logsumexp(1))
    return wanted - torch.stack(totals, 1).logsumexp(1)


def continuation_positions(pairs: Sequence[PairIds]) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, position and target [N] of every continuation token of right-padded pairs of ids.

    Position t predicts token t + 1, so a continuation is predicted from one position earlier on.
    """
    counts = np.array([len(c) for _, c in pairs])
    before = np.array([len(p) for p, _ in pairs]) - (counts.cumsum() - counts)  # from index to token position
    row, num = np.repeat(np.arange(len(pairs)), counts), int(counts.sum())
    position = np.arange(num) + before[row] - 1
    target = np.fromiter(chain.from_iterable(c for _, c in pairs), np.int64, num)
    return torch.from_numpy(row), torch.from_numpy(position), torch.from_numpy(target)


Pass = tuple[HostCopy, list[int]]  # float32 log-probs [N] on their way to the host, and the count of each row


class PendingScores:
    """The scores of a call that a device may still be computing. Any thread may wait for them.

    `passes` hold log-probs of rows on their way to the host, and `rows` their numbers in the call. `read` has the ids
    of each continuation, and the number of ids that belong to its prefix; or is empty.
    """

    def __init__(self, passes: Sequence[Pass], rows: Sequence[int], read: Sequence[tuple[list[int], int]]) -> None:
        self._passes, self._rows, self._read = passes, rows, read

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        return all(copy.is_there() for copy, _ in self._passes)

    def result(self) -> list[ContinuationScore]:
        """Return scores in the order of the call. Raises errors of the device."""
        logprobs = [part.numpy() for copy, sizes in self._passes for part in copy.tensor().split(sizes)]
        by_row = dict(zip(self._rows, logprobs, strict=True))
        if not self._read:
            return [ContinuationScore(by_row[row]) for row in range(len(by_row))]
        return [ContinuationScore.of_pair(by_row[row], *read) for row, read in enumerate(self._read)]
