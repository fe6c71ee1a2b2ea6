"""Neither embedding, scoring nor a training step waits for the device before its work is launched.

They run on a GPU that computes nothing (tests/support/fake_devices.py), transformers' part too.
"""

import contextlib
from pathlib import Path

import pytest
import torch

from replug.config.schema import LossConfig
from replug.data.datamodule import Position
from replug.data.records import ScoredBatch
from replug.models.local.hf_lm import HuggingFaceLM
from replug.train.module import LSRModule
from tests.models.fake_devices import GPU, counted_stops
from tests.support.tiny_lms import (
    CONTINUATIONS,
    PREFIXES,
    load,
    random_lms_need_make_no_sense,  # noqa: F401
    write_gpt2,
    write_llama,
)

TEXTS = ["a cat", "the mat and the cat", "a cat on a mat", "two"]


@pytest.fixture
def stepping(module: LSRModule, scored: ScoredBatch) -> LSRModule:
    module.logged = {}
    module.log_dict = module.logged.update
    return module


@pytest.mark.parametrize("levers", [False, True])
def test_a_step_waits_for_nothing_before_its_backward_pass(stepping, levers, monkeypatch):
    if levers:
        stepping._loss, stepping._dims = LossConfig(0.02, 0.5, contrastive=0.5), 16
    stepping._device = GPU
    with counted_stops(stepping.encoder, monkeypatch) as stops:
        assert stepping.training_step(Position(0), 0).device == GPU
    assert stops == []


def test_metrics_are_the_means_of_all_parts_and_are_fetched_after_the_last_backward_pass(stepping):
    each = []
    for part in range(2):
        each.append(stepping.training_step(Position(0, part, 2), part))
        assert stepping.logged == {}
        each[-1].backward()
        stepping.on_after_backward()
    assert float(stepping.logged["train/loss"]) == float(torch.stack(each).detach().mean())


def test_vectors_are_fetched_once(module, monkeypatch):
    with counted_stops(module.encoder, monkeypatch) as stops:
        module.encoder.encode(TEXTS, tokens_per_batch=8)
    assert stops == ["_to_copy"]


@pytest.fixture(params=[write_gpt2, write_llama])
def lm(request: pytest.FixtureRequest, tmp_path: Path) -> HuggingFaceLM:
    lm = load(request.param, tmp_path, tokens_per_batch=40)
    lm.model.set_attn_implementation("sdpa")  # as on a GPU
    return lm


def test_scoring_waits_for_nothing(lm, monkeypatch):
    with counted_stops(lm.model, monkeypatch) as stops:
        lm.launch(*lm.tokenize(PREFIXES, CONTINUATIONS))
    assert stops == []


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: x[torch.tensor([0])], "index"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.ops.aten.nonzero(x), "nonzero"),
    ],
)
def test_an_operation_that_would_wait_is_noticed(wait, name, module, monkeypatch):
    with counted_stops(module.encoder, monkeypatch) as stops:
        x = torch.empty(3, device=GPU)
        with contextlib.suppress(RuntimeError):  # a fake mask has no number of trues
            wait(x)
        assert stops == [name]
