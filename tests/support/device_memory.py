"""Bytes that a computation has at its peak on a GPU, without one: fake tensors have shapes and storages, no numbers.

They are fake on the CPU, where autocast casts the layers of encoders and decoders as it does on a GPU. Attention and
dropout alone are other kernels there, so they are replaced by those that torch takes on a GPU: flash in 16 bits
without a mask, else the memory-efficient one.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes that torch's caching allocator rounds to
ATEN = torch.ops.aten


class PeakBytes(TorchDispatchMode):
    """Bytes of storages that are alive, and the most that were."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = -(-storage.nbytes() // BLOCK) * BLOCK
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.held -= num_bytes


def _attention_of_a_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if attn_mask is None and query.dtype is not torch.float32:
        return ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    keeps = query.requires_grad
    return ATEN._scaled_dot_product_efficient_attention(query, key, value, bias, keeps, dropout_p, is_causal)[0]


def _dropout_of_a_gpu(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A CPU keeps as many numbers as there are values, a GPU a byte of each."""
    return ATEN.native_dropout(values, p, True)[0] if training and p else values


@contextmanager
def gpu_memory() -> Iterator[PeakBytes]:
    """Of all tensors that are made within."""
    with (
        FakeTensorMode(),
        patch.object(nn.functional, "scaled_dot_product_attention", _attention_of_a_gpu),
        patch.object(nn.functional, "dropout", _dropout_of_a_gpu),
        PeakBytes() as peak,
    ):
        yield peak


def make_fake(module: nn.Module) -> None:
    """In place: weights and tables are fake ones of the same shape, whatever device they were on; ties stay."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name, tensor in kept.items():
                if tensor is not None and id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                kept[name] = None if tensor is None else made[id(tensor)]
