"""GPUs that compute nothing: tensors have a device, a shape and a dtype, and no values (torch's FakeTensorMode).

What mixes devices fails as it would on GPUs. A torch built without CUDA lacks a few of the ways there, mended here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, masking_utils

aten = torch.ops.aten


def event(blocking: bool) -> SimpleNamespace:
    """Of a stream that has nothing to do."""
    return SimpleNamespace(record=lambda stream: None, query=lambda: True, synchronize=lambda: None)


@contextmanager
def fake_gpus(patch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    with patch.context() as mended:
        if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
            torch._C._ensureCUDADeviceGuardSet()
        mended.setattr(Tensor, "__getitem__", _indexing(Tensor.__getitem__))
        mended.setattr(Tensor, "contiguous", lambda self, **_: aten.clone(self, memory_format=torch.contiguous_format))
        mended.setattr(Tensor, "__deepcopy__", _copying(Tensor.__deepcopy__))
        mended.setattr(Tensor, "pin_memory", lambda self: self)
        mended.setattr(torch.cuda, "Event", event)
        mended.setattr(torch.cuda, "current_stream", lambda device: None)
        mended.setattr(Tensor, "numpy", lambda self: np.zeros(tuple(self.shape), dtype=np.float32))
        mended.setattr(FakeTensor, "tolist", lambda self: [0] * len(self))
        mended.setattr(torch, "tensor", _making(torch.tensor))
        mended.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _mask)
        mended.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
        mended.setattr(torch, "allclose", _equal_somewhere)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            mode.cache_enabled = False
            yield mode


GPU = torch.device("cuda", 0)
WAITED_FOR = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal", "is_nonzero")


class Stops(TorchDispatchMode):
    """Collects where the host would wait for a GPU: a number that it must know, a copy not in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, func.__name__.partition(".")[0]
        devices = {tensor.device.type for tensor in tree_leaves((args, given)) if isinstance(tensor, Tensor)}
        if "cuda" in devices and (name in WAITED_FOR or (name in ("index", "index_put") and any(map(_waits, args[1])))):
            self.waits.append(name)
        result = func(*args, **given)
        in_background = given.get("non_blocking") or any(value is True for value in args[2:])
        if name in ("_to_copy", "copy_") and not in_background and len(devices | {result.device.type}) > 1:
            self.waits.append(name)
        return result


def _waits(index: Tensor | None) -> bool:
    return index is not None and (index.dtype == torch.bool or index.device.type != "cuda")


@contextmanager
def counted_stops(module: nn.Module, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Put a module on a GPU for good and count. transformers looks at masks and positions as on a true GPU.

    No weight learns: a torch without CUDA knows no gradient there, and what comes before it is the same.
    """
    looks_at = {name: getattr(masking_utils, name) for name in ("find_packed_sequence_indices", "is_tracing")}
    looks_at["is_tracing"] = lambda tensor=None: False
    sdpa_mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    from_numpy = torch.from_numpy
    with fake_gpus(patch) as mode, patch.context() as mended, Stops() as stops:
        for name, function in looks_at.items():
            mended.setattr(masking_utils, name, function)
        mended.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", sdpa_mask)
        mended.setattr(torch, "from_numpy", lambda array: mode.from_tensor(from_numpy(array)))
        made: dict[int, Tensor] = {}
        for part in module.modules():
            for kept in (part._parameters, part._buffers):
                for name, tensor in kept.items():
                    kept[name] = None if tensor is None else made.setdefault(id(tensor), _on_gpu(tensor))
        stops.waits.clear()
        yield stops.waits


def _on_gpu(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda:0")
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake


def spread(model: PreTrainedModel, places: dict[str, str], dtype: torch.dtype) -> PreTrainedModel:
    """Lay modules on devices, and move what is between them, as `device_map` does."""
    laid: dict[int, nn.Parameter] = {}  # tied weights stay tied, where they were laid first
    for name, device in places.items():
        for module in model.get_submodule(name).modules():
            for key, weight in module.named_parameters(recurse=False):
                new = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=device), requires_grad=False)
                module._parameters[key] = laid.setdefault(id(weight), new)
                laid.setdefault(id(module._parameters[key]), module._parameters[key])
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={**places, "": "cuda:0"},
        offload=dict.fromkeys(places, False),
        skip_keys=model._skip_keys_device_placement,
    )
    return model


def _mask(batch_size: int, q_length: int, kv_length: int, device: object = None, **_: object) -> Tensor:
    return torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)


def _copying(of_real: Callable) -> Callable:
    def deepcopy(self: Tensor, memo: dict) -> Tensor:
        return aten.clone(self) if self.device.type == "cuda" else of_real(self, memo)

    return deepcopy


def _making(of_real: Callable) -> Callable:
    def tensor(data: object, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
        real = of_real(data, dtype=dtype)
        return real if device is None else torch.empty(real.shape, dtype=real.dtype, device=device)

    return tensor


def _equal_somewhere(a: Tensor, b: Tensor, *_: float) -> bool:
    """As far as devices go."""
    return (a == b).shape == a.shape


def _indexing(of_real: Callable) -> Callable:
    def getitem(self: Tensor, index: object) -> Tensor:
        if self.device.type != "cuda":
            return of_real(self, index)
        indices = [
            torch.empty(len(i), dtype=torch.long, device=self.device) if isinstance(i, list) else i
            for i in (index if isinstance(index, tuple) else (index,))
        ]
        if any(isinstance(i, Tensor) for i in indices):
            if any(i.device not in (self.device, torch.device("cpu")) for i in indices if isinstance(i, Tensor)):
                raise RuntimeError(f"indices on other devices than {self.device}")
            return aten.index.Tensor(self, [i if isinstance(i, Tensor) else None for i in indices])
        given = sum(i is not None and i is not Ellipsis for i in indices)
        out, axis = self, 0
        for i in indices:
            if i is None:
                out, axis = aten.unsqueeze(out, axis), axis + 1
            elif i is Ellipsis:
                axis += self.dim() - given
            elif isinstance(i, slice):
                out, axis = aten.slice(out, axis, i.start, i.stop, i.step or 1), axis + 1
            else:
                out = aten.select(out, axis, int(i))
        return out

    return getitem
