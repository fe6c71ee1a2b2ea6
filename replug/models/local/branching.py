"""Prompts whose answers branch: everything stands in one row, and a mask says what each token sees.

The keys and values of an opening, of the prompts behind it and of all answers under way are columns of one row. So an
opening of thousands of tokens is there once and not once for each answer, an answer that has ended costs nothing
more, and a new token of every answer is one pass over a single row. Positions are given, and masks are explicit, which
some architectures do not take: it is tried on the model itself before it is relied on.

R answers under way, N new tokens, S columns so far.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from replug.models.black_box_lm import PassCounts
from replug.models.hardware import to_device
from replug.models.local.shared_prefix import SharedPrefix, probe_ids
from replug.models.local.token_tree import TokenTree

# Columns of prompts and answers that are decoded together, in passes: more would read more columns of others than
# the weights that they share the reading of.
PASSES_PER_GROUP = 4


class ColumnLayer(DynamicLayer):
    """One layer's keys and values in room that was taken once: a new token copies no other."""

    def __init__(self, begun: DynamicLayer, num_columns: int) -> None:
        super().__init__()
        assert begun.keys is not None and begun.values is not None
        self.lazy_initialization(begun.keys, begun.values)
        self._room = [
            part.new_empty((1, part.shape[1], num_columns, part.shape[3])) for part in (begun.keys, begun.values)
        ]
        self._length = 0
        self.update(begun.keys, begun.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self._length = self._length, self._length + key_states.shape[2]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start : self._length] = new
        self.keys, self.values = (room[:, :, : self._length] for room in self._room)
        return self.keys, self.values


class BranchingPrompts:
    """`Branches` of prompts [P], `num_branches` answers each, in the order of the prompts.

    `rows` are the prompts' tokens behind `shared`, which may be None; `num_new` is the most tokens of an answer.
    """

    logits: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[list[int]],
        num_branches: int,
        num_new: int,
        counts: PassCounts,
        shared: SharedPrefix | None = None,
    ) -> None:
        self._model, self._counts = model, counts
        opening = shared.num_tokens if shared else 0
        owner = torch.arange(len(rows)).repeat_interleave(num_branches)
        self._lengths = torch.tensor([opening + len(row) for row in rows])[owner]  # [R]
        num_columns = opening + sum(map(len, rows)) + len(owner) * (num_new - 1)
        self._cache, logits = self._read(rows, num_columns, shared)
        own = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows]))
        # [R, S]: what each answer sees of the columns so far
        self._sees = torch.cat([torch.ones(len(owner), opening, dtype=torch.bool), owner[:, None] == own], 1)
        self.logits = logits[owner.to(logits.device)]

    def append(self, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """One pass for a token of each."""
        rows = torch.tensor(kept)
        self._sees = torch.cat([self._sees[rows], torch.eye(len(kept), dtype=torch.bool)], 1)
        positions, self._lengths = self._lengths[rows], self._lengths[rows] + 1
        output = self._model(
            input_ids=torch.tensor([list(tokens)], device=self._model.device),
            past_key_values=self._cache,
            use_cache=True,
            **placed(self._model, self._sees[None], positions[None]),
        )
        self.logits = output.logits[0]
        self._counts.add(len(kept), len(kept))

    def _read(self, rows: Sequence[list[int]], num_columns: int, shared: SharedPrefix | None) -> tuple[Cache, Tensor]:
        """The columns of all prompts, and logits [P, V]. Each prompt is read by itself, so none depends on another."""
        columns: Cache | None = None
        logits = []
        for row in rows:
            output = self._model(
                input_ids=torch.tensor([row], device=self._model.device),
                past_key_values=shared.for_one() if shared else None,
                use_cache=True,
                logits_to_keep=1,
            )
            logits.append(output.logits[0])
            columns = _with_columns(columns, output.past_key_values, len(row), num_columns)
            self._counts.add(len(row), len(row))
        assert columns is not None
        return columns, torch.cat(logits)


def _with_columns(columns: Cache | None, read: Cache, num_own: int, num_columns: int) -> Cache:
    """Add the last `num_own` columns of what was read; of the first prompt all, with the opening."""
    layers: Any = read.layers  # plain columns, as `takes_trees` found
    if columns is None:
        return Cache(layers=[ColumnLayer(layer, num_columns) for layer in layers])
    grown: Any = columns.layers
    for layer, new in zip(grown, layers, strict=True):
        layer.update(new.keys[:, :, -num_own:], new.values[:, :, -num_own:])
    return columns


def placed(model: PreTrainedModel, sees: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """What a pass needs to place its tokens: what each sees [B, N, S] as what is added to scores, and where [B, N]."""
    hidden = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    return {
        "attention_mask": to_device(hidden[:, None], model.device),
        "position_ids": to_device(positions, model.device),
    }


def tree_inputs(model: PreTrainedModel, trees: Sequence[TokenTree], num_shared: int) -> dict[str, Tensor]:
    """Of a pass over trees [B], padded on the right, behind a prefix of so many tokens that all of them see."""
    longest = max(tree.num_tokens for tree in trees)
    ids, positions = torch.zeros(2, len(trees), longest, dtype=torch.long)
    sees = torch.zeros(len(trees), longest, num_shared + longest, dtype=torch.bool)
    sees[:, :, :num_shared] = True
    sees[:, range(longest), range(num_shared, num_shared + longest)] = True  # padding sees itself, and no NaN comes
    for number, tree in enumerate(trees):
        size = tree.num_tokens
        ids[number, :size] = torch.tensor(tree.ids)
        positions[number, :size] = num_shared + torch.tensor(tree.depths)
        sees[number, :size, num_shared : num_shared + size] = torch.from_numpy(tree.sees())
    return {"input_ids": to_device(ids, model.device), **placed(model, sees, positions)}


def predicted_places(trees: Sequence[TokenTree]) -> tuple[Tensor, Tensor, Tensor]:
    """Tree, place in it and wanted token [N], of every token that is scored, row by row of each tree."""
    owner = [number for number, tree in enumerate(trees) for places in tree.predicted_from for _ in places]
    place = [place for tree in trees for places in tree.predicted_from for place in places]
    target = [token for tree in trees for tokens in tree.targets for token in tokens]
    return torch.tensor(owner), torch.tensor(place), torch.tensor(target)


def takes_trees(model: PreTrainedModel) -> bool:
    """Whether the model can be given positions and masks, and keeps its keys and values as plain columns."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    prefix = SharedPrefix(model, probe_ids(model)[:8])
    layers = getattr(prefix.for_one(), "layers", [])
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def branching_probe(model: PreTrainedModel) -> Tensor:
    """Log-probs [V] after the sixteen tokens of the probe and its fourth, read as a branch among others."""
    ids = probe_ids(model)
    prefix = SharedPrefix(model, ids[:8])
    prompts = BranchingPrompts(model, [ids[2:7], ids[8:15]], 2, 4, PassCounts(), prefix)
    prompts.append([ids[1], ids[5], ids[15]], [0, 2, 3])
    prompts.append([ids[4], ids[3]], [0, 2])
    return prompts.logits[1].float().log_softmax(-1)
