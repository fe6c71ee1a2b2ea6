"""A prefix that all inputs of a call share is computed once, and its keys and values serve every input.

Few-shot demonstrations are the case: sixteen of them are thousands of tokens before ten documents. Where a prefix ends
follows from a call's texts alone: kept or computed again, it gives the same numbers. The documents of one query share
nothing, since the document comes first.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Copying the keys and values of a shorter prefix costs more than computing it.
MIN_SHARED_TOKENS = 64
# Prefixes end at multiples of this, so that documents which begin with the same words leave the prefix as it is.
SHARED_STEP = 32


def shared_tokens(prefixes: list[list[int]]) -> int:
    """Return how many leading tokens all prefixes share; each keeps one or more to predict from. 0 means too few."""
    if len(prefixes) < 2:
        return 0
    first, last = min(prefixes), max(prefixes)  # these two differ the earliest
    most = min(len(prefix) for prefix in prefixes) - 1
    length = next((i for i in range(most) if first[i] != last[i]), most)
    return length - length % SHARED_STEP if length >= MIN_SHARED_TOKENS else 0


class SharedPrefix:
    """The keys and values of one prefix [1, T], handed out for any number of rows."""

    def __init__(self, model: PreTrainedModel, ids: list[int]) -> None:
        self.ids = ids
        inputs = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            self._cache: Any = model.base_model(input_ids=inputs, use_cache=True).past_key_values

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def has_window(self) -> bool:
        """Whether some layer keeps its latest keys and values only."""
        return any(getattr(self._cache, "is_sliding", []))

    def for_rows(self, num_rows: int) -> Any:
        """Return a cache for one pass over `num_rows` rows, which the pass lengthens."""
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(num_rows)
        return cache


def probe_ids(model: PreTrainedModel) -> list[int]:
    """Return sixteen tokens from all over the vocabulary, whose beginning is often special."""
    size = model.config.get_text_config().vocab_size
    return [size * (i + 1) // 17 for i in range(16)]


def reuses_prefixes(model: PreTrainedModel) -> bool:
    """Try whether a prefix's keys and values give what the whole input gives; architectures differ."""
    ids = probe_ids(model)
    with torch.inference_mode():
        whole = model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=True)
        if not hasattr(getattr(whole, "past_key_values", None), "batch_repeat_interleave"):
            return False
        rest = torch.tensor([ids[8:], ids[8:]], device=model.device)
        cache = SharedPrefix(model, ids[:8]).for_rows(2)
        apart = model.base_model(input_ids=rest, past_key_values=cache, use_cache=True).last_hidden_state
    return _same_direction(whole.last_hidden_state[:, 8:].expand_as(apart), apart)


def _same_direction(a: Tensor, b: Tensor) -> bool:
    """Equal up to a half-precision dtype's rounding; what ignores the prefix, or its length, is below 0.95."""
    return bool((torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1) > 0.99).all())
