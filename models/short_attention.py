"""Causal attention for short texts on a CPU, as plain matrix products.

torch's fused attention is made for long sequences: on a CPU and at the few hundred tokens of a document and a text it
takes a fifth of a small LM's time, and three plain products take half of that, with the same rounding as
transformers' own eager attention. Registered by transformers' interface for such functions; whatever is not short and
simply causal (caches, windows, masks, biases) goes to the fused one, with the mask that it would get.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "replug_short"
MAX_SHORT_TOKENS = 512  # beyond, all scores of a batch no longer fit in the processor's cache


def use_short_attention(model: PreTrainedModel) -> None:
    """Switch a model that would use torch's fused attention on a CPU; others are left as they are."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query [B, H, T, D], key and value [B, G, T, D] with H a multiple of G: output [B, T, H, D]."""
    if not _is_short_and_causal(module, query, key, attention_mask, options):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    key, value = (repeat_kv(x, groups).reshape(batch * heads, length, width) for x in (key, value))
    future = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    # Added inside the product, so that scores are written once; the mask is the same for every head.
    scores = torch.baddbmm(
        future.expand(batch * heads, length, length),
        query.reshape(batch * heads, length, width),
        key.transpose(1, 2),
        alpha=width**-0.5 if scaling is None else scaling,
    )
    output = torch.bmm(scores.softmax(-1), value).reshape(batch, heads, length, width)
    return output.transpose(1, 2).contiguous(), None


def _is_short_and_causal(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> bool:
    is_causal = options.get("is_causal")
    return (
        attention_mask is None
        and 1 < query.shape[2] == key.shape[2] <= MAX_SHORT_TOKENS
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        and options.get("position_bias") is None
        and options.get("cache") is None
        and not options.get("dropout")
    )


AttentionInterface.register(NAME, short_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
