"""The loss's levers, each against numbers worked out by hand, and what its gradient reaches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from replug.config.choices import TrainedSide
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.records import ScoredBatch
from replug.data.store import PreparedSet
from replug.models.build import load_encoder
from replug.train.batch_broadcast import Share
from replug.train.fitting import lsr_module
from replug.train.loss import LossTerms, contrastive_losses, kl_divergence, log_likelihood
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


def test_weights_are_of_what_the_lm_teaches_and_not_of_the_anchor():
    kl, contrastive, anchor = (torch.tensor(values) for values in ([1.0, 2.0], [3.0, 5.0], [7.0, 11.0]))
    terms = LossTerms(kl, contrastive, anchor)
    assert terms.total(0.5, 0.1, torch.tensor([2.0, 0.0])).tolist() == pytest.approx([2 * 2.5 + 0.7, 1.1])
    assert LossTerms(kl).total(0.5, 0.1, None).tolist() == [1.0, 2.0]


def test_the_anchor_is_zero_with_zero_gradient_where_nothing_moved():
    scores = SCORES.clone().requires_grad_()
    anchor = kl_divergence(log_likelihood(SCORES, 0.5), log_likelihood(scores, 0.5))
    anchor.sum().backward()
    assert anchor.tolist() == pytest.approx([0, 0]) and scores.grad.abs().max() < 1e-12


def test_the_anchors_gradient_leads_back_to_where_the_retriever_was():
    moved = (SCORES + torch.tensor([[0.0, 0.5], [0.0, 0.0]], dtype=torch.float64)).requires_grad_()
    kl_divergence(log_likelihood(SCORES, 0.5), log_likelihood(moved, 0.5)).sum().backward()
    assert moved.grad[0, 1] > 0 > moved.grad[0, 0] and moved.grad[1].abs().max() < 1e-12


# The module ---------------------------------------------------------------------------------------------


def test_each_lever_adds_its_own_part_to_the_loss(debug_config, data):
    batch = batch_of()
    losses = {
        name: float(module_of(debug_config, data, batch, **keys).training_step(Position(0), 0).detach())
        for name, keys in {
            "plain": {},
            "contrastive": {"contrastive": 0.5},
            "in_batch": {"contrastive": 0.5, "in_batch": True},
            "anchor": {"anchor": 2.0},
        }.items()
    }
    similarities = module_of(debug_config, data, batch).similarities(batch.retrieved).detach()
    gamma = debug_config.loss.gamma
    log_p, best = log_likelihood(similarities, gamma), torch.tensor([2, 1])
    contrastive = -log_p[torch.arange(2), best].mean()
    before = log_likelihood(torch.from_numpy(batch.retrieved.similarities), gamma)
    assert losses["contrastive"] == pytest.approx(losses["plain"] + 0.5 * float(contrastive), rel=1e-5)
    assert losses["anchor"] == pytest.approx(losses["plain"] + 2 * float(kl_divergence(before, log_p).mean()), rel=1e-5)
    assert losses["in_batch"] > losses["contrastive"]  # two more documents stand against each text's best


def test_a_text_that_weighs_nothing_has_no_gradient(debug_config, data):
    batch = batch_of(np.array([0.0, 1.0]))
    module = module_of(debug_config, data, batch)
    seen = []
    whole = module.similarities
    module.similarities = lambda found: seen.append(whole(found)) or seen[-1]
    loss = module.training_step(Position(0), 0)
    seen[0].retain_grad()
    loss.backward()
    assert seen[0].grad[0].abs().max() == 0 < seen[0].grad[1].abs().max()


def test_a_share_of_a_batch_has_the_weights_of_its_texts():
    assert Share(0, 1, 1, 2).of(batch_of(np.array([0.5, 1.5]))).weights.tolist() == [1.5]


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
