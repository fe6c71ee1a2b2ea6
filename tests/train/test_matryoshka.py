"""The loss at several prefixes, worked out by hand, and in the module."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.store import PreparedSet
from replug.models.build import load_encoder
from replug.models.encoder import first_numbers
from replug.train.fitting import lsr_module
from replug.train.loss import log_likelihood, text_losses
from replug.train.matryoshka import mean_over_prefixes, prefix_pairs
from replug.train.module import LSRModule
from replug.train.trained_weights import check_training
from tests.support.preparing import debug_set
from tests.support.training import Given, batch_of

HALF = math.sqrt(0.5)
QUERY = torch.tensor([[HALF, 0, HALF, 0]], dtype=torch.float64)
DOCUMENTS = torch.tensor([[1, 0, 0, 0], [0, HALF, HALF, 0]], dtype=torch.float64)


# Pure ---------------------------------------------------------------------------------------------------


def test_a_prefix_is_a_unit_vector_again_unless_similarities_are_inner_products():
    vectors = torch.tensor([[3.0, 4.0, 12.0]]) / 13
    assert first_numbers(vectors, 2, "cosine").tolist() == [pytest.approx([0.6, 0.8])]
    assert first_numbers(vectors, 2, "dot").tolist() == [pytest.approx([3 / 13, 4 / 13])]
    assert first_numbers(vectors, None, "cosine") is vectors is first_numbers(vectors, 3, "cosine")
    with pytest.raises(ValueError, match="vectors of 3 numbers have no first 4"):
        first_numbers(vectors, 4, "cosine")


def test_the_loss_is_the_mean_of_those_at_each_prefix():
    """Similarities are (cos 45, cos 60) of whole vectors, and (1, 0) of the first two numbers."""
    log_q = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    losses = [
        text_losses(log_q, log_likelihood(queries @ documents.T, 1.0), "kl_lm_retriever")
        for queries, documents in prefix_pairs(QUERY, DOCUMENTS, [4, 2], "cosine")
    ]
    whole = -math.log(2) - 0.5 * (HALF + 0.5) + math.log(math.exp(HALF) + math.exp(0.5))
    first_two = -math.log(2) - 0.5 * (1 + 0) + math.log(math.e + 1)
    assert [float(loss) for loss in losses] == pytest.approx([whole, first_two])
    assert float(mean_over_prefixes(losses)) == pytest.approx((whole + first_two) / 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return debug_set(tmp_path_factory.mktemp("data"))


# The module ---------------------------------------------------------------------------------------------


def module_of(config: Config, data: PreparedSet, dims: list[int], searched: int | None = None) -> LSRModule:
    config = replace(
        config,
        retriever=replace(config.retriever, dims=dims),
        index=replace(config.index, dims=searched),
        loss=replace(config.loss, contrastive=0.5, in_batch=True),
    )
    encoder = load_encoder(config.retriever, dims=searched)
    check_training(config, encoder)
    module = lsr_module(config, encoder, data)
    module.attach(Given(batch_of()))
    module.log_dict = lambda *args, **kwargs: None
    return module


def loss_of(module: LSRModule) -> float:
    return float(module.training_step(Position(0), 0).detach())


def test_a_step_is_the_mean_of_steps_at_each_prefix_with_every_term_of_the_loss(debug_config, data):
    whole, first, both = (loss_of(module_of(debug_config, data, dims)) for dims in ([32], [8], [8, 32]))
    assert both == pytest.approx((whole + first) / 2, rel=1e-6) and whole != pytest.approx(first, rel=1e-3)
    assert loss_of(module_of(debug_config, data, [])) == whole


def test_without_prefixes_the_loss_is_of_what_is_searched_by_and_queries_are_too(debug_config, data):
    module = module_of(debug_config, data, [], searched=8)
    assert loss_of(module) == loss_of(module_of(debug_config, data, [8]))
    vectors = module.encode_queries(["mida furo"])
    whole = module_of(debug_config, data, []).encode_queries(["mida furo"])[:, :8]
    np.testing.assert_allclose(vectors, whole / np.linalg.norm(whole), rtol=1e-6)


def test_metrics_are_those_of_the_longest_prefix(debug_config, data):
    seen = []
    for dims in ([8, 32], [32]):
        module = module_of(debug_config, data, dims)
        module.log_dict = seen.append
        loss_of(module)
        module.on_after_backward()
    assert seen[0]["train/kl"] == seen[1]["train/kl"] and seen[0]["train/loss"] != seen[1]["train/loss"]


def test_a_prefix_longer_than_the_vectors_is_refused_by_its_key(debug_config, data):
    with pytest.raises(UserError, match=r"retriever.dims: 64 is more than the 32 numbers of the retriever's vectors"):
        module_of(debug_config, data, [64])
    with pytest.raises(UserError, match=r"index.dims is 64, but vectors of .* have 32 numbers"):
        module_of(debug_config, data, [], searched=64)
