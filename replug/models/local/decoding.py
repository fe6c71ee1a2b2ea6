"""The model's own cache of keys and values: prompts that grow token by token, and prefixes they share.

Prompts are padded on the left; a mask hides the padding, and positions are counted by the mask. Some architectures
count otherwise, so the loader tries all of this on the model; where it fails, whole inputs are read again for every
token, which is slow and right for every causal model. A prefix that all inputs of a call share, such as few-shot
demonstrations, is computed once. Its end follows from a call's texts alone: kept or computed again, it gives the same
numbers.

With longrope (Phi-3-mini-128k, Phi-4-mini) the longest input of a pass decides by which frequencies all of it is read.
So no pass, cache or prefix holds inputs on both sides of that limit, and what grows beyond it is read anew there, as in
transformers' own `generate`.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replug.models.black_box_lm import PassCounts
from replug.models.local.output_layer import target_logprobs
from replug.models.probing import probe_ids, same_direction, tried

# Nats by which log-probs may differ with and without padding, on average by the tokens' probabilities.
TOLERANCE_NATS, TOLERANCE_NATS_HALF_PRECISION = 0.01, 0.15


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
            self.cache: Any = model.base_model(input_ids=inputs, use_cache=True).past_key_values

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def for_rows(self, num_rows: int) -> Any:
        """Return a cache for one pass over `num_rows` rows, which the pass lengthens."""
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(num_rows)
        return cache


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
    return same_direction(whole.last_hidden_state[:, 8:].expand_as(apart), apart)


class GrowingPrompts(Protocol):
    """Prompts that grow by a token each."""

    @property
    def logits(self) -> Tensor:
        """Return logits [K, V] of the token after each prompt."""
        ...

    @property
    def ends(self) -> Sequence[Tensor]:
        """Return log-probs (nats, float32) of the last tokens of each prompt as it began, as many as were asked for."""
        ...

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """Make the prompts `kept` (their numbers among those under way) longer by a token each; the others are done."""
        ...


class CachedPrompts:
    """Prompts whose keys and values are kept; each token costs one pass over as many positions as there are prompts.

    They are read a slice of columns at a time, of at most `tokens_per_pass` tokens, into one cache: the pass of a slice
    and that of a new token are the same. Equal prompts, such as those of several samples, are read once. `shared` holds
    the tokens before `rows` that all prompts begin with. `ends` are the log-probs of the last tokens of each row, of
    `num_ends` [K] tokens, fewer than the row has.
    """

    logits: Tensor  # [K, V] of the token after each prompt

    def __init__(
        self,
        model: PreTrainedModel,
        rows: list[list[int]],
        tokens_per_pass: int,
        counts: PassCounts,
        shared: SharedPrefix | None = None,
        num_ends: Sequence[int] = (),
    ) -> None:
        self._model, self._counts = model, counts
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        once = {tuple(row): number for number, row in enumerate(dict.fromkeys(map(tuple, rows)))}
        self._cache: Any = shared.for_rows(len(once)) if shared else None
        ids = _left_padded([torch.tensor(row) for row in once]).to(model.device)
        own = _left_padded([torch.ones(len(row), dtype=torch.long) for row in once])
        total = ids.shape[1]
        before = torch.ones(len(once), shared.num_tokens if shared else 0, dtype=torch.long)
        self._is_padded = not bool(own.all())
        self._seen = before.to(model.device)  # [K, T so far]: 1 where a token stands, 0 where padding does
        width = max(1, tokens_per_pass // len(once))
        wanted = total - max(num_ends, default=0)  # the first column whose log-probs are
        found: list[Tensor] = []
        shown = own.to(model.device)
        for start in range(0, total, width):
            end = min(start + width, total)
            logits = self._pass(ids[:, start:end], shown[:, start:end], min(end - start, max(1, end + 1 - wanted)))
            targets = ids[:, max(wanted, start + 1) : end + 1]  # a column predicts the next
            if targets.numel():
                logprobs = target_logprobs(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), None)
                found.append(logprobs.view(targets.shape))
            self.logits = logits[:, -1]
        counts.add(sum(map(len, once)), ids.numel())
        if len(once) < len(rows):
            owner = [once[tuple(row)] for row in rows]
            self._select(owner)
            self.logits = self.logits[owner]
            found = [part[owner] for part in found]
        ends = torch.cat(found, 1) if found else torch.empty(len(rows), 0)
        self.ends = [row[len(row) - n :] for row, n in zip(ends, num_ends, strict=bool(num_ends))]

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        if len(kept) < len(self._seen):
            self._select(kept)
        column = torch.tensor(tokens, device=self._model.device)[:, None]
        self.logits = self._pass(column, torch.ones_like(column), 1)[:, -1]
        self._counts.add(len(column), len(column))

    def _select(self, numbers: Sequence[int]) -> None:
        rows = torch.tensor(numbers)  # on the CPU: layers may be spread over devices
        self._cache.batch_select_indices(rows)
        self._seen = self._seen[rows]

    def _pass(self, ids: Tensor, mask: Tensor, num_kept: int) -> Tensor:
        """Read ids [K, N], of which `mask` shows those that are no padding. Logits after the last columns."""
        self._seen = torch.cat([self._seen, mask], 1)
        hidden = {"attention_mask": self._seen} if self._is_padded else {}  # attention without a mask is faster
        if self._is_padded and self._takes_positions:
            hidden["position_ids"] = (self._seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=num_kept, **hidden
        )
        self._cache = output.past_key_values
        return output.logits[:, -num_kept:]


class RecomputedPrompts:
    """Prompts that `read` reads anew for every token: ids of K prompts in, logits [K, V] out."""

    def __init__(
        self, rows: list[list[int]], read: Callable[[list[list[int]]], Tensor], ends: Sequence[Tensor] = ()
    ) -> None:
        self._rows, self._read, self.ends = rows, read, ends
        self.logits = read(rows)

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        self._rows = [[*self._rows[row], token] for row, token in zip(kept, tokens, strict=True)]
        self.logits = self._read(self._rows)


class PromptsBesideLimit:
    """Prompts in parts, none with prompts of both sides of `limit` tokens; what grows beyond it is a part of its own.

    `begin` makes a part of token ids.
    """

    def __init__(
        self,
        rows: list[list[int]],
        limit: float,
        begin: Callable[[list[list[int]]], GrowingPrompts],
        ends: Sequence[Tensor] = (),
    ) -> None:
        self._rows, self._limit, self._begin, self.ends = rows, limit, begin, ends
        sides = [
            [number for number, row in enumerate(rows) if (len(row) > limit) == is_long] for is_long in (False, True)
        ]
        self._parts = [(numbers, self._part(numbers)) for numbers in sides if numbers]

    @property
    def logits(self) -> Tensor:
        order = torch.tensor([number for numbers, _ in self._parts for number in numbers])
        logits = torch.cat([prompts.logits for _, prompts in self._parts])
        return logits[order.argsort()]

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        self._rows = [[*self._rows[row], token] for row, token in zip(kept, tokens, strict=True)]
        new = {row: number for number, row in enumerate(kept)}
        before, self._parts, crossed = self._parts, [], []
        for numbers, prompts in before:
            alive = [row for row in numbers if row in new]
            crossed += [new[row] for row in alive if len(self._rows[new[row]]) == self._limit + 1]
            staying = [row for row in alive if new[row] not in crossed]
            if staying:
                prompts.append([tokens[new[row]] for row in staying], [numbers.index(row) for row in staying])
                self._parts.append(([new[row] for row in staying], prompts))
        if crossed:
            self._parts.append((crossed, self._part(crossed)))

    def _part(self, numbers: Sequence[int]) -> GrowingPrompts:
        return self._begin([self._rows[number] for number in numbers])


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a model's keys and values can be kept for: unpadded prompts, padding on the left, padding after a prefix."""

    unpadded: bool = False
    padded: bool = False
    padded_after_prefix: bool = False


def find_cache_use(model: PreTrainedModel) -> CacheUse:
    """Try on sixteen tokens what the model does right: in floating point and not to the last bit."""
    if model.base_model is model or not reuses_prefixes(model):
        return CacheUse()
    ids, tolerance = probe_ids(model), TOLERANCE_NATS
    if model.dtype != torch.float32:
        tolerance = TOLERANCE_NATS_HALF_PRECISION
    with torch.inference_mode():
        prefix, alone = SharedPrefix(model, ids[:8]), _probe(model, [ids])
    likely = alone.exp() > 0

    @torch.inference_mode()
    def is_same(rows: list[list[int]], shared: SharedPrefix | None = None) -> bool:
        """Compare log-probs, on average by the expected probabilities; what has none does not count."""
        other = _probe(model, rows, shared)
        return float((alone.exp() * (alone - other).abs())[likely].sum()) < tolerance

    # A layer that looks back a number of columns would count padding after the prefix. Trying does not show that, since
    # windows are longer than the probe. GPT-Neo has one without telling its cache.
    is_sliding = any(getattr(prefix.cache, "is_sliding", []))
    has_window = is_sliding or getattr(model.config, "window_size", None) is not None
    return CacheUse(
        tried(lambda: is_same([ids, ids[::-1]]), False),
        tried(lambda: is_same([ids, ids + ids[:5]]), False),
        not has_window and tried(lambda: is_same([ids[8:], ids[8:] + ids[:5]], prefix), False),
    )


def _left_padded(rows: list[Tensor]) -> Tensor:
    """Return [K, T], with zeros on the left."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")


def _probe(model: PreTrainedModel, rows: list[list[int]], shared: SharedPrefix | None = None) -> Tensor:
    """Return log-probs [V] after the first row and one more token, read in slices and without the others."""
    prompts = CachedPrompts(model, rows, 6 * len(rows), PassCounts(), shared)
    prompts.append([probe_ids(model)[3]], [0])
    return prompts.logits[0].float().log_softmax(-1)
