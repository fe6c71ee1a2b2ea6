"""The output layer of a half-precision LM, whose logits are float32.

Products of bfloat16 numbers are summed in float32 by every processor that multiplies them; only the result is rounded.
A logit of 20 in bfloat16 is wrong by up to 0.06, and a log-probability by 5% of what documents differ in. This layer
takes a linear one's place in the model, so what a model does to its logits afterwards (soft-capping, a scale) is
done to float32 too. It holds the weights of the layer it replaces, and no float32 copy of them. What models in
float32 compute is not changed: their layer stays.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Entries of the vocabulary in one product. On a CPU their weights are float32 for it, and with their logits stay in its
# cache. A GPU's fast kernels want rows of logits that begin at a multiple of 64, which vocabularies such as 50,257 give
# in no other way; and so many positions have no more logits at a time than a few hundred had of a whole vocabulary.
ENTRIES_PER_PIECE = {"cpu": 1024, "cuda": 16_384}


class Float32Head(nn.Module):
    """Hidden states [..., D] of the weight's dtype to float32 logits [..., V], under autocast too."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """A GPU makes all logits in one product: there are few rows where all are asked for."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        size = len(self.weight) if self.weight.device.type == "cuda" else None
        return torch.cat([logits for _, logits in self.pieces(rows, size)], 1).unflatten(0, hidden.shape[:-1])

    def pieces(self, rows: Tensor, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Float32 logits [N, P] of hidden states [N, D], a piece of the vocabulary after another, each with its start.

        They are on the weight's device, which makes them of half-precision weights if it is a GPU.
        """
        rows = rows.to(self.weight.device, self.weight.dtype)  # layers may be spread over devices
        size = size or ENTRIES_PER_PIECE[rows.device.type]
        with torch.autocast(rows.device.type, enabled=False), _exact_bfloat16_products(rows):
            for start in range(0, len(self.weight), size):
                logits = _product(rows, self.weight[start : start + size])
                yield start, logits if self.bias is None else logits + self.bias[start : start + size].float()


def use_float32_head(model: PreTrainedModel) -> None:
    """Give a half-precision model an output layer with float32 logits; models in float32 are left as they are."""
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


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Float32 [N, P] of [N, D] and [P, D] in half precision."""
    if rows.device.type == "cuda":
        return torch.mm(rows, weight.T, out_dtype=torch.float32)
    return torch.mm(rows.float(), weight.float().T)


@contextmanager
def _exact_bfloat16_products(rows: Tensor) -> Iterator[None]:
    """Float32 products by a CPU's bfloat16 units where it has some: exact, since the numbers are bfloat16 already.

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
    """The output layer, where logits are that layer of the last hidden state and nothing more.

    Models that scale or cap their logits differ; they are scored through their whole forward pass.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    probe = torch.arange(8, device=model.device)[None]
    with torch.inference_mode():
        whole = model(input_ids=probe, use_cache=False).logits
        apart = head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    return head if whole.shape == apart.shape and _are_same(whole, apart.to(whole.device)) else None


def _are_same(whole: Tensor, apart: Tensor) -> bool:
    """Logits in float32, whatever the model's dtype: the same products, so nothing but their rounding may differ.

    A cap of 30, as Gemma 2's, changes a logit of 1 by forty times the tolerance.
    """
    return torch.allclose(whole, apart)
