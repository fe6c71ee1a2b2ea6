"""Change transformers' layers in place where that saves time, and probe a model for the abilities of its architecture.

**Fused layers.** Many models write the formula of GELU (Hendrycks & Gimpel 2016) out: eight operations on the widest
tensor of a layer. torch's one kernel computes it in one pass, in float32 within. torch's fused attention takes a fifth
of a small LM's time on a CPU. Two plain products and a softmax, in blocks that stay in the processor's cache, take half
of that. Attention that is not simply causal (windows, masks, biases) goes to torch's, with its mask.

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
from transformers.masking_utils import causal_mask_function, sdpa_mask
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


CPU_ATTENTION = "replug_cpu"
POSITIONS_PER_BLOCK = 64  # more would compute more scores of later positions, fewer would make small products
BLOCK_BYTES = 4 * 2**20  # of attention scores at a time


def use_cpu_attention(model: PreTrainedModel) -> None:
    """Switch a model with torch's fused attention on a CPU to `blocked_attention`; leave others as they are.

    Architectures that read the mask themselves, such as DeepSeek's sparse attention, stay too: here it may be None.
    """
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return
    ids = torch.tensor([probe_ids(model)])

    @torch.inference_mode()
    def logits() -> Tensor:
        return model(input_ids=ids, use_cache=False).logits

    expected = tried(logits, None)
    model.set_attn_implementation(CPU_ATTENTION)
    changed = tried(logits, None)
    if expected is not None and (changed is None or not same_direction(expected, changed)):
        model.set_attn_implementation("sdpa")


def blocked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, T, H, D] of query [B, H, T, D] to key and value [B, G, S, D]: S - T earlier positions."""
    if query.shape[2] == 1 or not is_plain(module, attention_mask, options):
        if attention_mask is None and 1 < query.shape[2] < key.shape[2]:
            attention_mask = _future(query, key.shape[2]).isfinite()
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    earlier, per_group = key.shape[2] - query.shape[2], query.shape[1] // key.shape[1]
    parts = []
    for start in range(0, query.shape[2], POSITIONS_PER_BLOCK):
        some = query[:, :, start : start + POSITIONS_PER_BLOCK]
        seen = earlier + start + some.shape[2]  # later keys are not computed
        # The heads of a group share keys and values: their queries become rows of one product.
        rows = some.reshape(key.shape[0] * key.shape[1], per_group * some.shape[2], some.shape[3])
        keys, values = key[:, :, :seen].flatten(0, 1), value[:, :, :seen].flatten(0, 1)
        parts.append(_products(rows, keys, values, _future(some, seen).repeat(per_group, 1), scale).reshape(some.shape))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _products(query: Tensor, key: Tensor, value: Tensor, future: Tensor, scale: float) -> Tensor:
    """Return attention [N, R, D] of query [N, R, D] to key and value [N, S, D]; `future` [R, S] is added to scores."""
    size = max(1, BLOCK_BYTES // (future.numel() * future.element_size()))
    parts = []
    for q, k, v in zip(query.split(size), key.split(size), value.split(size), strict=True):
        # The mask is added inside the product, so that scores are written once.
        scores = torch.baddbmm(future.expand(len(q), *future.shape), q, k.transpose(1, 2), alpha=scale)
        parts.append(torch.bmm(scores.softmax(-1), v))
    return torch.cat(parts)


def _future(query: Tensor, num_keys: int) -> Tensor:
    """Return [T, S]: minus infinity where a position would see a later one, else 0."""
    length = query.shape[2]
    return query.new_full((length, num_keys), float("-inf")).triu(1 + num_keys - length)


def is_plain(module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Return whether attention is causal and nothing more."""
    is_causal = options.get("is_causal")
    return (
        attention_mask is None
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        and not any(options.get(name) for name in ("dropout", "softcap"))
        and all(options.get(name) is None for name in ("position_bias", "cache", "s_aux"))
    )


def _causal_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Return None for a mask that is only causal, else the mask of the fused attention."""
    plain = options.get("mask_function") is causal_mask_function and options.get("local_size") is None
    whole = options.get("kv_length") == options.get("q_length", 0) + int(options.get("q_offset", 0))
    if plain and whole and options.get("attention_mask") is None and options.get("kv_offset", 0) == 0:
        return None
    return sdpa_mask(*arguments, **options)


AttentionInterface.register(CPU_ATTENTION, blocked_attention)
AttentionMaskInterface.register(CPU_ATTENTION, _causal_mask)


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
