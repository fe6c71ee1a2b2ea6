"""Change transformers' layers in place where that saves time, and probe a model for the abilities of its architecture.

**Fused layers.** Many models write the formula of GELU (Hendrycks & Gimpel 2016) out: eight operations on the widest
tensor of a layer. torch's one kernel computes it in one pass, in float32 within.

**Masks.** transformers asks a GPU whether it may leave a mask out, and whether positions show several texts in one
row; each question makes the host wait for all launched work. Callers pass a mask only if it hides something.

**Probes.** A probe is a small trial of transformers' code, since none of its 200 architectures declares its abilities.
Any error means no, except that a lack of memory says nothing about the architecture.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.activations import AccurateGELUActivation, FastGELUActivation, GELUTanh, NewGELUActivation
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.bloom.modeling_bloom import BloomGelu

log = logging.getLogger(__name__)

# The name of the argument and the output that hold keys and values: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__annotations__ else "past_key_values"

Found = TypeVar("Found")


def tried(probe: Callable[[], Found], otherwise: Found) -> Found:
    """Return the result of a probe, or `otherwise` if the architecture fails it."""
    try:
        return probe()
    except Exception as error:  # foreign code of 200 architectures raises any kind of error
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        log.debug(f"{probe} says no: {type(error).__name__}: {error}")
        return otherwise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out: a CPU's allocator and CUDA's libraries raise a plain RuntimeError."""
    signs = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def probe_ids(model: PreTrainedModel) -> list[int]:
    """Return sixteen tokens from all over the vocabulary: its first ones are often special."""
    size = model.config.get_text_config().vocab_size
    return [size * (i + 1) // 17 for i in range(16)]


def same_direction(a: Tensor, b: Tensor) -> bool:
    """Return whether states are equal up to rounding; states that ignore the prefix or its length are below 0.95."""
    return bool((torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1) > 0.99).all())


# Ways to write 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); some round sqrt(2 / pi) to eight digits.
WRITTEN_OUT = (NewGELUActivation, FastGELUActivation, AccurateGELUActivation, GELUTanh, BloomGelu)


def use_fused_gelu(model: nn.Module) -> None:
    """Replace a model's GELU activations of several operations by torch's kernel. Weights stay as they are."""
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if type(part) in WRITTEN_OUT:
            model.set_submodule(name, nn.GELU("tanh"))


GIVEN_MASKS = "replug_given_mask"


def trust_given_masks(model: PreTrainedModel) -> None:
    """Switch an encoder with torch's fused attention to masks that are not inspected; leave others as they are."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GIVEN_MASKS)


def _given_mask(*arguments: Any, **options: Any) -> Tensor | None:
    if options.get("attention_mask") is not None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*arguments, **options)


AttentionInterface.register(GIVEN_MASKS, sdpa_attention_forward)
AttentionMaskInterface.register(GIVEN_MASKS, _given_mask)


class NoCache(Cache):
    """A cache that keeps no keys and values. A model with a cache does not look for several texts in a row."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.inference_mode()
def no_cache(model: PreTrainedModel) -> NoCache | None:
    """Return a `NoCache` for a causal LM; None if the architecture needs a real cache."""
    ids = torch.tensor([probe_ids(model)], device=model.device)

    def states(cache: NoCache | None) -> Tensor:
        output: Tensor = model(input_ids=ids, use_cache=False, **{CACHE: cache}).logits
        return output

    expected, actual = tried(partial(states, None), None), tried(partial(states, NoCache()), None)
    is_same = expected is not None and actual is not None and torch.allclose(expected, actual)
    return NoCache() if is_same else None
