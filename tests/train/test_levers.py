"""The loss's levers, each against numbers worked out by hand, and what its gradient reaches."""

import math
from dataclasses import replace

import pytest
import torch

from replug.config.choices import TrainedSide
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.records import ScoredBatch
from replug.data.store import PreparedSet
from replug.models.build import load_encoder
from replug.train.fitting import lsr_module
from replug.train.loss import contrastive_losses, log_likelihood
from replug.train.module import LSRModule
from tests.support.training import Given, batch_of

SCORES = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
LOG_Q = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).log()


def module_of(config: Config, data: PreparedSet, batch: ScoredBatch, **loss: object) -> LSRModule:
    config = replace(config, loss=replace(config.loss, **loss))
    module = lsr_module(config, load_encoder(config.retriever), data)
    module.attach(Given(batch))
    module.log_dict = lambda *args, **kwargs: None
    return module


# Pure ---------------------------------------------------------------------------------------------------


def test_the_contrastive_term_is_info_nce_on_the_lms_best_document():
    expected = [math.log(math.exp(1) + math.exp(2)) - 1, math.log(1 + math.exp(3)) - 3]
    assert contrastive_losses(SCORES, LOG_Q).tolist() == pytest.approx(expected)


def test_other_documents_of_the_batch_stand_against_the_best_one_and_minus_infinity_is_none():
    others = torch.tensor([[0.5, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64)
    expected = [math.log(math.exp(1) + math.exp(2) + math.exp(0.5)) - 1, math.log(1 + math.exp(3)) - 3]
    assert contrastive_losses(SCORES, LOG_Q, others).tolist() == pytest.approx(expected)


# The module ---------------------------------------------------------------------------------------------


def test_each_lever_adds_its_own_part_to_the_loss(debug_config, data):
    batch = batch_of()
    losses = {
        name: float(module_of(debug_config, data, batch, **keys).training_step(Position(0), 0).detach())
        for name, keys in {
            "plain": {},
            "contrastive": {"contrastive": 0.5},
            "in_batch": {"contrastive": 0.5, "in_batch": True},
        }.items()
    }
    similarities = module_of(debug_config, data, batch).similarities(batch.retrieved).detach()
    gamma = debug_config.loss.gamma
    log_p, best = log_likelihood(similarities, gamma), torch.tensor([2, 1])
    contrastive = -log_p[torch.arange(2), best].mean()
    assert losses["contrastive"] == pytest.approx(losses["plain"] + 0.5 * float(contrastive), rel=1e-5)
    assert losses["in_batch"] > losses["contrastive"]  # two more documents stand against each text's best


def test_with_the_query_side_alone_documents_have_no_gradient_and_their_encoder_never_moves(debug_config, data):
    config = replace(debug_config, retriever=replace(debug_config.retriever, train=TrainedSide.query))
    module = module_of(config, data, batch_of())
    assert module.frozen_documents is not None and module.documents is not module.encoder
    before = {name: weight.clone() for name, weight in module.documents.named_parameters()}
    optimizer = module.configure_optimizers()["optimizer"]
    module.training_step(Position(0), 0).backward()
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in module.documents.named_parameters())
    assert all(weight.grad is None for weight in module.documents.parameters())
    moved = [not torch.equal(weight, before[name]) for name, weight in module.encoder.named_parameters()]
    assert any(moved)
    assert not any(name.startswith("_frozen") for name in module.state_dict())  # in no checkpoint
