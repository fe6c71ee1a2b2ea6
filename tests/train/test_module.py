"""One LSR step on a real (tiny) encoder: what moves, what does not, and what is refused."""

import numpy as np
import pytest
import torch

from replug.data.datamodule import Position
from replug.data.records import ScoredBatch
from replug.index_workers.build_plan import IndexState
from replug.models.black_box_lm import ContinuationScore
from replug.train.loss import log_likelihood, text_losses
from replug.train.module import LSRModule, OptimizerSettings, learning_rate_factor
from replug.train.pipeline import ScoreError
from tests.support.training import InlineLM, pipeline_for


class NanLM(InlineLM):
    def score(self, prefixes, continuations):
        return [ContinuationScore(np.array([np.nan], dtype=np.float32)) for _ in prefixes]


def one_step(module: LSRModule) -> torch.Tensor:
    module.log_dict = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()["optimizer"]
    loss = module.training_step(Position(0), 0)
    loss.backward()
    optimizer.step()
    return loss


def test_every_weight_that_should_move_has_moved_after_one_step(module, data):
    pipeline_for(module, data, InlineLM()).advance(0, IndexState(0, 0))
    before = {name: weight.clone() for name, weight in module.encoder.named_parameters()}
    one_step(module)
    # A bias on the keys shifts all of a query's attention scores alike, so softmax cancels it: its gradient is 0.
    idle = ("pooler", "key.bias")
    for name, weight in module.encoder.named_parameters():
        moved = not torch.equal(weight, before[name])
        assert moved or any(part in name for part in idle), name


def test_both_query_and_documents_get_gradient(module, data):
    pipeline = pipeline_for(module, data, InlineLM())
    pipeline.advance(0, IndexState(0, 0))
    scored = pipeline.take(0)
    encoded = []
    original = module.encoder.encode_with_gradient
    module.encoder.encode_with_gradient = lambda ids, prompt: encoded.append(original(ids)) or encoded[-1]
    similarities = module.similarities(scored.retrieved)
    for vectors in encoded:
        vectors.retain_grad()
    (similarities * torch.randn_like(similarities)).sum().backward()
    assert len(encoded) == 2
    assert all(vectors.grad.abs().sum() > 0 for vectors in encoded)


def test_similarities_equal_one_by_one_encoding(module, data):
    pipeline = pipeline_for(module, data, InlineLM())
    pipeline.advance(0, IndexState(0, 0))
    batch = pipeline.take(0).retrieved
    fresh = module.similarities(batch).detach().numpy()
    np.testing.assert_allclose(fresh, batch.similarities, atol=1e-5)  # the index was made by the same weights


class Given:
    """The same batch at every step."""

    def __init__(self, batch: ScoredBatch) -> None:
        self._batch = batch

    def take(self, step: int) -> ScoredBatch:
        return self._batch


def gradient(module: LSRModule, parts: int = 1) -> dict[str, torch.Tensor]:
    """Of the mean over the parts of a batch."""
    module.log_dict = lambda *args, **kwargs: None
    module.zero_grad()
    for part in range(parts):
        (module.training_step(Position(0, part, parts), part) / parts).backward()
    return {name: weight.grad.clone() for name, weight in module.encoder.named_parameters() if weight.grad is not None}


def test_a_gradient_added_up_over_parts_or_computed_again_is_that_of_the_whole_batch(module, data):
    pipeline = pipeline_for(module, data, InlineLM())
    pipeline.advance(0, IndexState(0, 0))
    module.attach(Given(pipeline.take(0)))
    whole = gradient(module)
    largest = max(float(values.abs().max()) for values in whole.values())
    in_parts = gradient(module, parts=4)
    module.encoder.prepare_training(dropout=False, gradient_checkpointing=True, compiled=False)
    for other in (in_parts, gradient(module)):
        for name, values in whole.items():
            torch.testing.assert_close(other[name], values, rtol=1e-4, atol=1e-5 * largest)


def test_the_loss_is_that_of_the_formula(module, data):
    pipeline = pipeline_for(module, data, InlineLM())
    pipeline.advance(0, IndexState(0, 0))
    scored = pipeline.peek(0)
    log_q = log_likelihood(torch.tensor(scored.sum_logprobs / scored.num_tokens[:, None]).float(), 0.5)
    log_p = log_likelihood(module.similarities(scored.retrieved).detach(), 0.02)
    expected = text_losses(log_q, log_p, "kl_lm_retriever").mean()
    torch.testing.assert_close(one_step(module).detach(), expected)


def test_depth_changes_only_which_weights_encoded_the_query(module, data):
    pipeline = pipeline_for(module, data, InlineLM(), depth=2, steps=4)
    pipeline.advance(0, IndexState(0, 0))
    assert [batch.step for batch in pipeline.state()] == [0, 1, 2]
    pipeline.take(0)
    pipeline.advance(1, IndexState(7, 1))
    assert [(b.step, b.query_step, b.index_version) for b in pipeline.state()] == [(1, 0, 0), (2, 0, 0), (3, 1, 7)]
    pipeline.take(1)
    pipeline.advance(2, IndexState(7, 1))
    assert [batch.step for batch in pipeline.state()] == [2, 3], "nothing beyond the last step"


def test_restored_batches_are_scored_as_before(module, data):
    pipeline = pipeline_for(module, data, InlineLM(), depth=1)
    pipeline.advance(0, IndexState(0, 0))
    state, expected = pipeline.state(), [pipeline.peek(step).sum_logprobs for step in (0, 1)]
    other = pipeline_for(module, data, InlineLM(), depth=1)
    other.restore(state)
    for step, sums in enumerate(expected):
        np.testing.assert_array_equal(other.peek(step).sum_logprobs, sums)


def test_a_score_that_is_no_number_is_refused_with_the_ids(module, data):
    pipeline = pipeline_for(module, data, NanLM())
    pipeline.advance(0, IndexState(0, 0))
    first = data.queries.windows(pipeline.state()[0].query_rows[:1])[0].id
    with pytest.raises(ScoreError, match=rf"text {first} after document text-\d+#\d+ is nan"):
        pipeline.take(0)


def test_the_learning_rate_rises_then_falls_to_zero():
    settings = OptimizerSettings("adam", 2e-5, 0.0, 0.1, 100)
    factors = [learning_rate_factor(step, settings) for step in range(101)]
    assert factors[:10] == sorted(factors[:10]) and 0 < factors[0] < 0.2
    assert factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[99] > 0 and factors[100] == 0
