"""The key-value cache of a model: prompts that grow token by token, and their shared prefixes.

Prompts are padded on the left, behind the prefix that they share; a mask hides the padding, and positions are counted
by the mask. Some architectures count otherwise, so the loader tries all of this on the model; if it fails, whole inputs
are read again for every token, which is slow and right for every causal model. A prefix that all inputs of a call
share, such as few-shot demonstrations, is computed once. Its end depends on a call's texts alone, so a kept prefix and
a recomputed one give the same numbers.

Prompts that share most of their tokens, such as fifty samples of one prompt, are packed into one row with a mask for
each. Their shared tokens are then kept once, and read once for the next token of all prompts.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
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
# Each prompt of a row computes attention to the columns of all: up to the tokens of a pass, or this many times the
# longest prompt.
LONGEST_PROMPTS = 2


def shared_tokens(prefixes: list[list[int]]) -> int:
    """Return the number of leading tokens that all prefixes share, short of a whole prefix. 0 means too few."""
    if len(prefixes) < 2:
        return 0
    first, last = min(prefixes), max(prefixes)  # these two differ the earliest
    most = min(len(prefix) for prefix in prefixes) - 1
    length = next((i for i in range(most) if first[i] != last[i]), most)
    return length - length % SHARED_STEP if length >= MIN_SHARED_TOKENS else 0


def is_worth_a_row(rows: Sequence[Sequence[int]], num_shared: int, tokens_per_pass: int) -> bool:
    """Return whether prompts with `num_shared` common leading tokens share enough to be packed into one row.

    Equal prompts count once.
    """
    num_columns = sum(len(row) - num_shared for row in set(map(tuple, rows)))
    return num_columns < sum(map(len, rows)) and num_columns <= _most_columns(max(map(len, rows)), tokens_per_pass)


def _most_columns(longest: int, tokens_per_pass: int) -> int:
    return max(tokens_per_pass, LONGEST_PROMPTS * longest)


def packed_groups(
    items: Sequence[list[list[int]]], num_shared: int, num_new: int, tokens_per_pass: int
) -> Iterator[list[int]]:
    """Yield groups of items, each of one or several prompts, that together fit one row.

    A group has at least one item. Each prompt is continued by `num_new` tokens; items of equal prompts are adjacent.
    """
    group: list[int] = []
    seen: set[tuple[int, ...]] = set()
    num_columns = longest = 0
    for number, rows in enumerate(items):
        once = set(map(tuple, rows))
        longest = max(longest, *map(len, rows))
        num_columns += sum(len(row) - num_shared for row in once - seen) + num_new * len(rows)
        if group and num_columns > _most_columns(longest, tokens_per_pass):
            yield group
            group, seen, longest = [], set(), max(map(len, rows))
            num_columns = sum(len(row) - num_shared for row in once) + num_new * len(rows)
        group.append(number)
        seen |= once
    if group:
        yield group


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


class PackedPrompts:
    """Prompts packed into one row; a mask limits the attention of each token to its own prompt.

    Equal prompts are read once, and `shared` holds their common prefix. Neither is copied for each prompt, so a new
    token of all prompts reads these keys and values once. New tokens add columns, which stay after a prompt has ended.
    `ends` are as in `CachedPrompts`.
    """

    logits: Tensor  # [K, V] of the token after each prompt

    def __init__(
        self,
        model: PreTrainedModel,
        rows: list[list[int]],
        tokens_per_pass: int,
        counts: Counter[str],
        shared: SharedPrefix | None,
        num_ends: Sequence[int],
        require_wanted: Callable[[], object] = list,
    ) -> None:
        self._model, self._counts, device = model, counts, model.device
        self._cache: Any = shared.for_rows(1) if shared else None
        before = len(shared.ids) if shared else 0
        once = {row: number for number, row in enumerate(dict.fromkeys(map(tuple, rows)))}
        lengths = torch.tensor([len(row) for row in once])
        ids, owner = torch.tensor(list(chain(*once))), torch.arange(len(once)).repeat_interleave(lengths)
        columns, last = torch.arange(len(ids)), lengths.cumsum(0) - 1
        following = last[owner] - columns  # the number of tokens of its prompt after each
        positions = before + lengths[owner] - 1 - following
        logits: list[Tensor] = []
        logprobs = torch.zeros(len(ids))
        for part in columns.split(tokens_per_pass):
            require_wanted()
            earlier = columns[: part[-1] + 1]
            own = (owner[part, None] == owner[earlier]) & (part[:, None] >= earlier)
            seen = torch.cat([torch.ones(len(part), before, dtype=torch.bool), own], 1).to(device)
            kept = part[following[part] <= max(num_ends)]  # predict an end, or the token after a prompt
            kept_logits = self._pass(ids[part].to(device), positions[part].to(device), seen, kept - part[0])
            is_last = following[kept] == 0
            logits.append(kept_logits[is_last])
            targets = kept[~is_last] + 1
            if len(targets):
                logprobs[targets] = target_logprobs(kept_logits[~is_last], ids[targets].to(device), None).cpu()
        counts.update(tokens=len(ids), padded_tokens=len(ids))
        of = torch.tensor([once[tuple(row)] for row in rows])
        self.ends = [logprobs[end + 1 - n : end + 1] for end, n in zip(last[of].tolist(), num_ends, strict=True)]
        self.logits = torch.cat(logits)[of]
        self._positions = (before + lengths[of]).to(device)  # [K] of the next tokens
        prompts = [torch.ones(len(rows), before, dtype=torch.bool), of[:, None] == owner]
        self._seen = torch.cat(prompts, 1).to(device)  # [K, columns so far]: the tokens of each prompt

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        device = self._model.device
        own, rows = torch.eye(len(kept), dtype=torch.bool, device=device), torch.tensor(kept)
        self._seen, positions = torch.cat([self._seen[rows], own], 1), self._positions[rows]
        self.logits = self._pass(torch.tensor(tokens, device=device), positions, self._seen, torch.arange(len(kept)))
        self._positions = positions + 1
        self._counts.update(tokens=len(kept), padded_tokens=len(kept))

    def _pass(self, ids: Tensor, positions: Tensor, seen: Tensor, kept: Tensor) -> Tensor:
        """Read ids [N], which see the columns `seen` [N, C]; return logits [M, V] at the places `kept` [M]."""
        hidden = torch.zeros(seen.shape, dtype=self._model.dtype, device=seen.device)
        hidden.masked_fill_(~seen, torch.finfo(hidden.dtype).min)  # added to attention scores
        output = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=hidden[None, None],
            use_cache=True,
            logits_to_keep=(kept if len(kept) else kept.new_zeros(1)).tolist(),
            **{CACHE: self._cache},
        )
        self._cache = output[CACHE]
        logits: Tensor = output.logits[0]
        if len(logits) == len(ids):  # some architectures ignore the option and return all
            logits = logits[kept]
        return logits[: len(kept)]


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
GrowingPrompts = CachedPrompts | PackedPrompts | RecomputedPrompts


# Use of the key-value cache: several prompts in a row, prompts behind a shared prefix, whole prompts, or no cache.
PACKED, SHARED, PADDED, ANEW = "packed", "shared", "padded", "anew"


def find_cache_use(model: PreTrainedModel) -> str:
    """Return the model's best use of its cache, tried on sixteen tokens with a tolerance for rounding.

    Models that can be packed can share a prefix, and these can be padded.
    """
    if model.base_model is model or not reuses_prefixes(model):
        return ANEW
    ids, tolerance = probe_ids(model), TOLERANCE_NATS
    if model.dtype != torch.float32:
        tolerance = TOLERANCE_NATS_HALF_PRECISION
    with torch.inference_mode():
        prefix, alone = SharedPrefix(model, ids[:8]), _probe(model, CachedPrompts(model, [ids], 6, Counter()))
    likely = alone.exp() > 0

    @torch.inference_mode()
    def is_same(begin: Callable[[], GrowingPrompts]) -> bool:
        """Compare log-probs, weighted by the expected probabilities; impossible tokens do not count."""
        other = _probe(model, begin())
        return float((alone.exp() * (alone - other).abs())[likely].sum()) < tolerance

    # A layer with a sliding window would count the padding behind a prefix, and columns of other prompts. The probe
    # does not show that, since windows are longer than it. GPT-Neo has a window that its cache does not know.
    has_window = any(getattr(prefix.cache, "is_sliding", [])) or getattr(model.config, "window_size", None) is not None
    # BigBird has a buffer as long as its longest input, which a packed row may exceed.
    has_buffer = any(name.endswith("token_type_ids") for name, _ in model.named_buffers())
    rows = [ids[8:], ids[12:] + ids[:9], ids[8:]]
    padded = partial(CachedPrompts, model, [ids, ids + ids[:5]], 12, Counter())
    shared = partial(CachedPrompts, model, rows, 12, Counter(), prefix)
    packed = partial(PackedPrompts, model, rows, 6, Counter(), prefix, [0] * len(rows))
    if not tried(partial(is_same, padded), False):
        return ANEW
    if has_window or not tried(partial(is_same, shared), False):
        return PADDED
    return PACKED if not has_buffer and tried(partial(is_same, packed), False) else SHARED


def _left_padded(rows: list[Tensor]) -> Tensor:
    """Return [K, T], with zeros on the left."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")


def _probe(model: PreTrainedModel, prompts: GrowingPrompts) -> Tensor:
    """Return log-probs [V] after the first prompt and two more tokens; other prompts get other tokens."""
    ids, number = probe_ids(model), len(prompts.logits)
    prompts.append([ids[3 + i] for i in range(number)], range(number))
    prompts.append([ids[7]], [0])
    return prompts.logits[0].float().log_softmax(-1)
