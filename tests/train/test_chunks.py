"""Chunks of a training step have the whole batch's gradient and keep the activations of one chunk at a time."""

import pytest
import torch

from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.models import batching
from replug.train.module import LSRModule
from tests.support.training import Given, InlineLM, module_given, pipeline_for

CHUNK = 64  # padded tokens, of which the step has hundreds


@pytest.fixture
def make(debug_config: Config, data: PreparedSet):
    def make(chunk_tokens: int | None, dropout: bool = False, **loss: object) -> LSRModule:
        torch.manual_seed(0)
        sections = {"retriever": {"dropout": dropout}, "train": {"chunk_tokens": chunk_tokens}, "loss": loss}
        module = module_given(debug_config, data, **sections)
        pipeline = pipeline_for(module, data, InlineLM())
        pipeline.advance(0, IndexState(0, 0))
        module.batches = Given(pipeline.take(0))
        return module

    return make


def step(module: LSRModule) -> tuple[float, dict[str, torch.Tensor]]:
    loss = module.training_step(Position(0), 0)
    loss.backward()
    gradients = {name: weight.grad for name, weight in module.encoder.named_parameters() if weight.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("lever", [{}, {"contrastive": 0.5, "in_batch": True}])
def test_the_gradient_is_that_of_the_whole_batch(make, lever: dict[str, object]) -> None:
    (loss, whole), (in_chunks, chunked) = step(make(None, **lever)), step(make(CHUNK, **lever))
    assert in_chunks == pytest.approx(loss, rel=1e-6)
    largest = max(float(values.abs().max()) for values in whole.values())
    assert chunked.keys() == whole.keys()
    for name, values in whole.items():
        torch.testing.assert_close(chunked[name], values, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize("dropout", [False, True])
def test_recomputed_passes_have_the_same_bits_and_the_same_dropout(make, monkeypatch, dropout: bool) -> None:
    """Against passes of the same texts, whose activations are kept."""
    loss, chunked = step(make(CHUNK, dropout))
    monkeypatch.setitem(batching.ENCODER_TOKENS_WITH_GRADIENT, "cpu", CHUNK)
    kept_loss, kept = step(make(None, dropout))
    assert loss == kept_loss
    assert all(torch.equal(chunked[name], values) for name, values in kept.items())


def kept_bytes(module: LSRModule) -> int:
    """Bytes that the forward pass keeps for the backward pass, without weights."""
    weights = {weight.data_ptr() for weight in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module.training_step(Position(0), 0)
    return sum(kept.values())


def test_the_forward_pass_keeps_vectors_and_no_activations(make) -> None:
    assert kept_bytes(make(CHUNK)) < kept_bytes(make(None)) / 5
