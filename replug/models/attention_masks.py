"""Keep transformers from asking a GPU about masks: each question makes the host wait for all that was launched.

Callers pass a mask only if it hides something. transformers would check whether it may leave a mask out, and whether
positions tell of several texts in one row.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from replug.models.probing import probe_ids, tried

NAME = "replug_given_mask"


def trust_given_masks(model: PreTrainedModel) -> None:
    """Switch an encoder with torch's fused attention to masks that are not looked at; others are left as they are."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    if options.get("attention_mask") is not None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*arguments, **options)


AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, _mask)


class NoCache(Cache):
    """Hand keys and values through and keep none. A model that has a cache does not look for several texts in a row."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.inference_mode()
def no_cache(model: PreTrainedModel) -> NoCache | None:
    """Return what to give a causal LM as its cache; None where the architecture needs one of its own."""
    ids = torch.tensor([probe_ids(model)], device=model.device)

    def states(cache: NoCache | None) -> Tensor:
        output: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=False).logits
        return output

    expected, found = tried(partial(states, None), None), tried(partial(states, NoCache()), None)
    is_same = expected is not None and found is not None and torch.allclose(expected, found)
    return NoCache() if is_same else None
