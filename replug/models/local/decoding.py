"""The key-value cache of a model: prompts that grow token by token, and their shared prefixes.

Prompts are padded on the left, behind the prefix that they share; a mask hides the padding, and positions are counted
by the mask. Some architectures count otherwise, so the loader tries all of this on the model; if it fails, whole inputs
are read again for every token, which is slow and right for every causal model. A prefix that all inputs of a call
share, such as few-shot demonstrations, is computed once. Its end depends on a call's texts alone, so a kept prefix and
a recomputed one give the same numbers.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replug.models.architecture import CACHE, probe_ids, same_direction, tried
from replug.models.local.output_layer import target_logprobs

# Nats by which log-probs may differ with and without padding, on average by the tokens' probabilities.
TOLERANCE_NATS, TOLERANCE_NATS_HALF_PRECISION = 0.01, 0.15


# Copying the keys and values of a shorter prefix costs more than computing it.
MIN_SHARED_TOKENS = 64
# Prefixes end at multiples of this, so that documents with the same first words do not lengthen it.
SHARED_STEP = 32


def shared_tokens(prefixes: list[list[int]]) -> int:
    """Return the number of leading tokens that all prefixes share, short of a whole prefix. 0 means too few."""
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
            self.cache: Any = model.base_model(input_ids=inputs, use_cache=True)[CACHE]

    def for_rows(self, num_rows: int) -> Any:
        """Return a copy of the cache for a pass over `num_rows` rows, which extends it."""
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(num_rows)
        return cache


def reuses_prefixes(model: PreTrainedModel) -> bool:
    """Return whether a prefix's keys and values reproduce a pass over the whole input, on a probe."""
    ids = probe_ids(model)
    with torch.inference_mode():
        whole = model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=True)
        if not hasattr(whole.get(CACHE), "batch_repeat_interleave"):
            return False
        rest = torch.tensor([ids[8:], ids[8:]], device=model.device)
        cache = SharedPrefix(model, ids[:8]).for_rows(2)
        apart = model.base_model(input_ids=rest, use_cache=True, **{CACHE: cache}).last_hidden_state
    return same_direction(whole.last_hidden_state[:, 8:].expand_as(apart), apart)


class Unwanted(Exception):
    """Raised while prompts are read if no caller waits for their answers."""


class CachedPrompts:
    """Prompts with cached keys and values; a new token of all costs one pass over one position for each prompt.

    `rows` are the prompts without their `shared` prefix. They are read in slices of columns, of at most
    `tokens_per_pass` tokens, into one cache: slices and new tokens use the same pass. Equal prompts, as for several
    samples, are read once. `ends` are log-probs of the last `num_ends` [K] tokens of each row, fewer than the row has.
    `require_wanted` is called before each slice, and raises Unwanted if no caller waits for the answers.
    """

    logits: Tensor  # [K, V] of the token after each prompt

    def __init__(
        self,
        model: PreTrainedModel,
        rows: list[list[int]],
        tokens_per_pass: int,
        counts: Counter[str],
        shared: SharedPrefix | None = None,
        num_ends: Sequence[int] = (),
        require_wanted: Callable[[], object] = list,
    ) -> None:
        self._model, self._counts = model, counts
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        once = {tuple(row): number for number, row in enumerate(dict.fromkeys(map(tuple, rows)))}
        self._cache: Any = shared.for_rows(len(once)) if shared else None
        ids = _left_padded([torch.tensor(row) for row in once]).to(model.device)
        own = _left_padded([torch.ones(len(row), dtype=torch.long) for row in once])
        total = ids.shape[1]
        self._is_padded = not bool(own.all())
        # [K, T so far]: 1 at tokens, 0 at padding, which stands behind the shared prefix
        self._seen = own.new_ones(len(once), len(shared.ids) if shared else 0).to(model.device)
        width = max(1, tokens_per_pass // len(once))
        wanted = total - max(num_ends, default=0)  # the first column with wanted log-probs
        parts: list[Tensor] = []
        shown = own.to(model.device)
        for start in range(0, total, width):
            require_wanted()
            end = min(start + width, total)
            logits = self._pass(ids[:, start:end], shown[:, start:end], min(end - start, max(1, end + 1 - wanted)))
            targets = ids[:, max(wanted, start + 1) : end + 1]  # a column predicts the next
            if targets.numel():
                logprobs = target_logprobs(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), None)
                parts.append(logprobs.view(targets.shape))
            self.logits = logits[:, -1]
        counts.update(tokens=sum(map(len, once)), padded_tokens=ids.numel())
        if len(once) < len(rows):
            owner = [once[tuple(row)] for row in rows]
            self._select(owner)
            self.logits = self.logits[owner]
            parts = [part[owner] for part in parts]
        ends = torch.cat(parts, 1) if parts else torch.empty(len(rows), 0)
        self.ends = [row[len(row) - n :] for row, n in zip(ends, num_ends, strict=bool(num_ends))]

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        if len(kept) < len(self._seen):
            self._select(kept)
        column = torch.tensor(tokens, device=self._model.device)[:, None]
        self.logits = self._pass(column, torch.ones_like(column), 1)[:, -1]
        self._counts.update(tokens=len(column), padded_tokens=len(column))

    def _select(self, numbers: Sequence[int]) -> None:
        rows = torch.tensor(numbers)  # on the CPU: layers may be spread over devices
        self._cache.batch_select_indices(rows)
        self._seen = self._seen[rows]

    def _pass(self, ids: Tensor, mask: Tensor, num_kept: int) -> Tensor:
        """Read ids [K, N] with a `mask` of 0 at padding; return logits [K, num_kept, V] of the last columns."""
        self._seen = torch.cat([self._seen, mask], 1)
        hidden = {"attention_mask": self._seen} if self._is_padded else {}  # attention without a mask is faster
        if self._is_padded and self._takes_positions:
            hidden["position_ids"] = (self._seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=num_kept, **{CACHE: self._cache}, **hidden)
        self._cache = output[CACHE]
        return output.logits[:, -num_kept:]


class RecomputedPrompts:
    """Prompts that `read` reads again for every token: ids of K prompts in, logits [K, V] out."""

    def __init__(
        self, rows: list[list[int]], read: Callable[[list[list[int]]], Tensor], ends: Sequence[Tensor] = ()
    ) -> None:
        self._rows, self._read, self.ends = rows, read, ends
        self.logits = read(rows)

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        self._rows = [[*self._rows[row], token] for row, token in zip(kept, tokens, strict=True)]
        self.logits = self._read(self._rows)


# Prompts that grow by a token each. `logits` [K, V] are of the token after each. `append` adds a token to each of the
# prompts `kept` (numbers among the current ones); the others have ended.
GrowingPrompts = CachedPrompts | RecomputedPrompts


# Use of the key-value cache: prompts behind a shared prefix, whole prompts, or no cache.
SHARED, PADDED, ANEW = "shared", "padded", "anew"


def find_cache_use(model: PreTrainedModel) -> str:
    """Return the model's best use of its cache, tried on sixteen tokens with a tolerance for rounding."""
    if model.base_model is model or not reuses_prefixes(model):
        return ANEW
    ids, tolerance = probe_ids(model), TOLERANCE_NATS
    if model.dtype != torch.float32:
        tolerance = TOLERANCE_NATS_HALF_PRECISION
    with torch.inference_mode():
        prefix, alone = SharedPrefix(model, ids[:8]), _probe(model, CachedPrompts(model, [ids], 6, Counter()))
    likely = alone.exp() > 0

    @torch.inference_mode()
    def is_same(rows: list[list[int]], shared: SharedPrefix | None) -> bool:
        """Compare log-probs, weighted by the expected probabilities; impossible tokens do not count."""
        other = _probe(model, CachedPrompts(model, rows, 12, Counter(), shared))
        return float((alone.exp() * (alone - other).abs())[likely].sum()) < tolerance

    if not tried(partial(is_same, [ids, ids + ids[:5]], None), False):
        return ANEW
    # A layer with a sliding window would count the padding behind a prefix. The probe does not show that, since windows
    # are longer than it. GPT-Neo has a window that its cache does not know.
    has_window = any(getattr(prefix.cache, "is_sliding", [])) or getattr(model.config, "window_size", None) is not None
    rows = [ids[8:], ids[12:] + ids[:9], ids[8:]]
    return SHARED if not has_window and tried(partial(is_same, rows, prefix), False) else PADDED


def _left_padded(rows: list[Tensor]) -> Tensor:
    """Return [K, T], with zeros on the left."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")


def _probe(model: PreTrainedModel, prompts: GrowingPrompts) -> Tensor:
    """Return log-probs [V] after the first prompt and two more tokens; other prompts get other tokens."""
    ids, number = probe_ids(model), len(prompts.logits)
    prompts.append([ids[3 + i] for i in range(number)], range(number))
    prompts.append([ids[7]], [0])
    return prompts.logits[0].float().log_softmax(-1)
