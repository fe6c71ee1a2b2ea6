"""Nothing of a training step waits for the device before its backward pass is launched.

There is no device here, so what would wait is looked for: operations whose result the host must know, and copies of a
tensor to the host. transformers looks at a mask by itself; what happens within the backbone is not ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replug.config.schema import LossConfig
from replug.data.datamodule import Position

WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal", "is_nonzero")
TO_HOST = ("cpu", "numpy", "tolist", "item", "__array__")


class Waits(TorchDispatchMode):
    """Collects the names of operations that a device would have to finish first."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in WAITING or (name in ("index", "index_put") and any(map(_is_mask, args[1]))):
            self._found.append(name)
        return func(*args, **(kwargs or {}))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


@contextmanager
def waits(module, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    with monkeypatch.context() as patched:
        for name in TO_HOST:
            patched.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name), found))
        inner = module.encoder.backbones[0].forward
        patched.setattr(module.encoder.backbones[0], "forward", lambda **given: unseen(found, inner, given))
        with Waits(found):
            yield found


def noting(name: str, method, found: list[str]):
    def noted(self, *args, **kwargs):
        found.append(name)
        return method(self, *args, **kwargs)

    return noted


def unseen(found: list[str], forward, given: dict):
    before = list(found)
    hidden = forward(**given)
    found[:] = before
    return hidden


@pytest.fixture
def stepping(module, scored):
    module.logged = {}
    module.log_dict = module.logged.update
    return module


def test_metrics_are_fetched_after_the_backward_pass_and_not_before(stepping, monkeypatch):
    with waits(stepping, monkeypatch) as found:
        loss = stepping.training_step(Position(0), 0)
        assert found == [] and stepping.logged == {}
        loss.backward()
        assert found == []
        stepping.on_after_backward()
        assert {"tolist", "cpu"} <= set(found)
    assert float(stepping.logged["train/loss"]) == float(loss.detach())


def test_levers_wait_for_nothing_either(stepping, monkeypatch):
    stepping._loss, stepping._dims = LossConfig(0.02, 0.5, contrastive=0.5, in_batch=True), (16, 8)
    with waits(stepping, monkeypatch) as found:
        stepping.training_step(Position(0), 0).backward()
        assert found == []


def test_metrics_are_the_means_of_all_parts_and_come_with_the_last(stepping):
    each = []
    for part in range(2):
        each.append(stepping.training_step(Position(0, part, 2), part))
        assert stepping.logged == {}
        each[-1].backward()
        stepping.on_after_backward()
    assert float(stepping.logged["train/loss"]) == float(torch.stack(each).detach().mean())


def test_what_would_wait_is_found(module, monkeypatch):
    with waits(module, monkeypatch) as found:
        ones = torch.ones(3)
        bool(ones.sum() > 1), float(ones[0]), ones[ones > 0], ones.cpu()
    assert found == ["_local_scalar_dense", "_local_scalar_dense", "index", "cpu"]
