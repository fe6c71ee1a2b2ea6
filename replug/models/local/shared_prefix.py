"""A prefix that all inputs of a call share is computed once, and its keys and values serve every input.

Few-shot demonstrations are the case: sixteen of them are thousands of tokens before ten documents, and the same before
every question, so the latest prefixes are kept for other calls. Where a prefix ends follows from a call's texts alone:
kept or computed anew, it gives the same numbers. The documents of one query share nothing, since the document comes
first; for them nothing changes.
"""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Shorter ones cost more in copied keys and values than they save (benchmarks/shared_prefix.py).
MIN_SHARED_TOKENS = 64
# Prefixes end at multiples of this: the first words of the documents behind them, which some calls share by chance,
# would make each call's prefix another.
SHARED_STEP = 32
# Of all prefixes that are kept: 0.4 GB for SmolLM2 in float32, 4 GB for a 7B model without grouped queries.
KEPT_TOKENS = 8192


def shared_tokens(prefixes: list[list[int]]) -> int:
    """Leading tokens common to all prefixes, less one or more that each keeps to predict from; 0 where too few."""
    if len(prefixes) < 2:
        return 0
    first, last = min(prefixes), max(prefixes)  # these two differ the earliest
    most = min(len(prefix) for prefix in prefixes) - 1
    length = next((i for i in range(most) if first[i] != last[i]), most)
    return length - length % SHARED_STEP if length >= MIN_SHARED_TOKENS else 0


class SharedPrefix:
    """The keys and values of one prefix [1, T], handed out for any number of rows."""

    def __init__(self, model: PreTrainedModel, ids: list[int]) -> None:
        self.num_tokens = len(ids)
        inputs = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            self._cache: Any = model.base_model(input_ids=inputs, use_cache=True).past_key_values

    @property
    def has_window(self) -> bool:
        """Whether some layer keeps its latest keys and values only."""
        return any(getattr(self._cache, "is_sliding", []))

    def for_one(self) -> Any:
        """A cache for one row, which shares what it holds: only for caches that lengthen without writing in place."""
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in self._cache.layers]
        return cache

    def for_rows(self, num_rows: int) -> Any:
        """A cache of its own for a pass over `num_rows` rows, which the pass will lengthen."""
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(num_rows)
        return cache


class KeptPrefixes:
    """The prefixes used last, of `KEPT_TOKENS` in all or a single longer one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._kept: OrderedDict[tuple[int, ...], SharedPrefix] = OrderedDict()

    def __contains__(self, ids: list[int]) -> bool:
        return tuple(ids) in self._kept

    def __getitem__(self, ids: list[int]) -> SharedPrefix:
        """Computed where it is not kept."""
        key = tuple(ids)
        if key not in self._kept:
            self._make_room(len(ids))
            self._kept[key] = SharedPrefix(self._model, ids)
        self._kept.move_to_end(key)
        return self._kept[key]

    def clear(self) -> bool:
        """Give their memory back; whether there was any."""
        had_some = bool(self._kept)
        self._kept.clear()
        return had_some

    def _make_room(self, num_tokens: int) -> None:
        while self._kept and sum(map(len, self._kept)) + num_tokens > KEPT_TOKENS:
            self._kept.popitem(last=False)


def probe_ids(model: PreTrainedModel) -> list[int]:
    """Sixteen tokens from all over the vocabulary, whose beginning is often special."""
    size = model.config.get_text_config().vocab_size
    return [size * (i + 1) // 17 for i in range(16)]


def reuses_prefixes(model: PreTrainedModel) -> bool:
    """Whether a prefix's keys and values give what the whole input gives. Tried, since architectures differ."""
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
