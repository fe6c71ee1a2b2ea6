"""Under the trainer's autocast only the backbone computes in bfloat16: vectors, similarities and loss are float32."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replug.data.datamodule import Position
from replug.train.loss import log_likelihood, text_losses
from replug.train.module import inner_products
from tests.support.training import encoded_queries


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_the_loss_is_that_of_float32_to_the_last_bit(module, scored):
    def encode(ids, task="document"):
        """Give random unit vectors, the same with and without autocast."""
        vectors = torch.randn(len(ids), 768, generator=torch.Generator().manual_seed(len(ids)))
        return torch.nn.functional.normalize(vectors, dim=-1).requires_grad_()

    module.encoder.encode_with_gradient = encode
    module.log_dict = lambda *args, **kwargs: None
    log_q = log_likelihood(torch.tensor(scored.sum_logprobs / scored.num_tokens[:, None]).float(), 0.5)
    log_p = log_likelihood(module.similarities(scored.retrieved)[0][0], 0.02)
    with autocast():
        loss = module.training_step(Position(0), 0)
    assert loss.dtype == torch.float32
    assert loss.item() == text_losses(log_q, log_p, "kl_lm_retriever").mean().item()


def test_queries_are_encoded_in_bfloat16_only_where_train_precision_says_so(module, data):
    texts = [example.context for example in data.queries.examples(range(20))]
    exact, rounded = encoded_queries(module, texts), encoded_queries(module, texts, autocast=True)
    assert rounded.dtype == np.float32 and not np.array_equal(rounded, exact)
    assert (rounded * exact).sum(1) == pytest.approx(np.ones(20), abs=1e-3)
    assert np.array_equal(encoded_queries(module, texts, autocast=True), rounded)
    with autocast():
        assert np.array_equal(encoded_queries(module, texts), exact)
        assert np.array_equal(encoded_queries(module, texts[:1]), exact[:1])


def test_inner_products_are_float32_under_the_autocast_of_a_gpu():
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` refuses to where there is no GPU
    try:
        with FakeTensorMode():
            queries, documents = torch.empty(2, 8, device="cuda"), torch.empty(2, 3, 8, device="cuda")
            assert torch.einsum("bd,bkd->bk", queries, documents).dtype == torch.bfloat16, "this is what autocast does"
            assert inner_products(queries, documents).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)
