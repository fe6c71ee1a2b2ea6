"""Rows of a pass one behind the other in a single row, without padding: each token sees its own row alone.

Units are cut by bytes, so rows of a GPU's pass differ in tokens, and an eighth of what it would compute is padding. A
kernel for rows of several lengths (torch's `varlen_attn`, which is flash attention) needs none; on a CPU the blocks of
`cpu_attention` are computed row by row, where it is no gain. The attention is the model's for one such pass: all other
passes are as they were. What is not simply causal is not packed, and it is tried on the model itself.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from replug.config.errors import UserError
from replug.models.hardware import to_device
from replug.models.local.cpu_attention import causal_blocks, is_plain
from replug.models.local.shared_prefix import probe_ids

NAME = "replug_packed"
MOST_HEAD_WIDTH = 256  # that the kernel takes
LEAST_CAPABILITY = (8, 0)  # of a GPU: Ampere
LEAST_COSINE = 0.999  # of hidden states with and without the other rows, in half precision


class NotPackable(ValueError):
    """Attention that is more than causal."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Of a pass: `starts` is int32 [B + 1] on the device, the ends of rows included."""

    lengths: list[int]
    starts: Tensor


_rows: ContextVar[PackedRows | None] = ContextVar("rows of the pass", default=None)


def packed_states(body: nn.Module, rows: Sequence[list[int]]) -> Tensor:
    """Last hidden states [T, D] of all tokens of the rows, one row behind the other."""
    model: Any = body
    lengths, device = [len(row) for row in rows], model.device
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ids = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(length) for length in lengths])
    with _packed(model, PackedRows(lengths, to_device(starts, device))):
        output = model(
            input_ids=to_device(ids, device)[None],
            position_ids=to_device(positions, device)[None],
            # Of the form that transformers takes for a finished mask: else it would look at positions on the host.
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=device),
            use_cache=False,
        )
    return cast(Tensor, output.last_hidden_state[0])


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query [1, H, T, D], key and value [1, G, T, D] of all rows of the pass: [1, T, H, D]."""
    rows = _rows.get()
    assert rows is not None and query.shape[0] == 1 and query.shape[2] == key.shape[2] == sum(rows.lengths)
    if options.get("sliding_window") is not None or not is_plain(module, None, options):
        raise NotPackable("a window, a bias or a cap")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if on_gpu(query):
        return _by_kernel(query, key, value, rows, scale)
    queries, keys, values = (whole.split(rows.lengths, 2) for whole in (query, key, value))
    parts = [causal_blocks(q, k, v, scale) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def on_gpu(tensor: Tensor) -> bool:
    """Where the kernel is."""
    return tensor.device.type == "cuda"


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> tuple[Tensor, None]:
    if query.shape[3] > MOST_HEAD_WIDTH:
        raise NotPackable(f"heads of {query.shape[3]} numbers")
    queries, keys, values = (whole[0].transpose(0, 1) for whole in (query, key, value))
    ends = rows.starts, rows.starts, max(rows.lengths), max(rows.lengths)
    causal: Any = {"window_size": (-1, 0)}  # what it is called there
    seen = varlen_attn(queries, keys, values, *ends, scale=scale, enable_gqa=query.shape[1] != key.shape[1], **causal)
    return cast(Tensor, seen)[None], None


def packed_states_at(body: nn.Module, rows: Sequence[list[int]], row: Tensor, position: Tensor) -> Tensor:
    """Last hidden states [N, D] at positions [N] of rows [N]."""
    states = packed_states(body, rows)
    starts = torch.tensor([0, *accumulate(len(one) for one in rows)])
    return states[to_device(starts[row] + position, states.device)]


@contextmanager
def _packed(body: Any, rows: PackedRows) -> Iterator[None]:
    """One thread computes, so nobody else sees the model so."""
    before, token = body.config._attn_implementation, _rows.set(rows)
    body.config._attn_implementation = NAME
    try:
        yield
    finally:
        body.config._attn_implementation = before
        _rows.reset(token)


def packs_rows(model: PreTrainedModel, asked: bool | None, default: bool, obstacle: str | None, path: str) -> bool:
    """Whether passes have no padding: as asked, else by default where nothing keeps the model from it.

    Raises UserError, with the reason, where it is asked for and cannot be.
    """
    if not (default if asked is None else asked):
        return False
    reason = obstacle or why_not_packed(model)
    if reason is not None and asked:
        raise UserError(f"lm.packed is true, but {path} cannot be packed: {reason}; expected lm.packed=false")
    return reason is None


def why_not_packed(model: PreTrainedModel) -> str | None:
    """What about the model or its device keeps it from packed rows; None where nothing does."""
    if model.device.type == "cuda" and (lacks := _why_no_kernel(model)):
        return lacks
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return f"{type(model).__name__} is not told positions"
    ids = probe_ids(model)
    rows = [ids[:11], ids[5:], ids[3:9], ids[2:3]]
    with torch.inference_mode():
        try:
            packed = packed_states(model.base_model, rows)
        except NotPackable as error:
            return f"{type(model).__name__} has attention with {error}"
        alone = [
            model.base_model(input_ids=torch.tensor([row], device=model.device), use_cache=False).last_hidden_state[0]
            for row in rows
        ]
    return None if _are_same(torch.cat(alone), packed) else f"{type(model).__name__} computes other numbers then"


def _why_no_kernel(model: PreTrainedModel) -> str | None:
    if model.dtype == torch.float32:
        return "the GPU's kernel takes half precision only"
    if torch.cuda.get_device_capability(model.device) < LEAST_CAPABILITY:
        return "the GPU is older than the kernel's (Ampere)"
    return None if torch.backends.cuda.is_flash_attention_available() else "this torch has no flash attention"


def _are_same(alone: Tensor, packed: Tensor) -> bool:
    """To rounding; in half precision by direction."""
    if alone.dtype == torch.float32:
        return torch.allclose(alone, packed, rtol=1e-3, atol=1e-3 * float(alone.abs().max()))
    cosines = torch.nn.functional.cosine_similarity(alone.float(), packed.float(), dim=-1)
    return bool((cosines > LEAST_COSINE).all())


AttentionInterface.register(NAME, packed_attention)
