"""One LSR step on a tiny encoder: the weights that move, the loss, its precision, chunks, waits, and refusals."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replug.config.errors import NotFiniteError, RunError
from replug.config.schema import Config, LossConfig, TrainConfig
from replug.data.datamodule import Position
from replug.data.records import ScoredBatch
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.models import batching
from replug.models.black_box_lm import ContinuationScore
from replug.models.encoder import first_numbers
from replug.train.loss import log_likelihood, text_losses
from replug.train.module import LSRModule, inner_products, learning_rate_factor
from tests.models.fake_devices import GPU, counted_stops
from tests.support.tiny_lms import CONTINUATIONS, PREFIXES, load, write_llama
from tests.support.training import Given, InlineLM, batch_of, encoded_queries, module_given, pipeline_for


def one_step(module: LSRModule) -> torch.Tensor:
    optimizer = module.configure_optimizers()["optimizer"]
    loss = module.training_step(Position(0), 0)
    loss.backward()
    optimizer.step()
    return loss


def test_every_weight_that_should_move_has_moved_after_one_step(module, scored):
    before = {name: weight.clone() for name, weight in module.encoder.named_parameters()}
    one_step(module)
    # A bias on the keys shifts all of a query's attention scores alike, so softmax cancels it: its gradient is 0.
    idle = ("pooler", "key.bias")
    for name, weight in module.encoder.named_parameters():
        moved = not torch.equal(weight, before[name])
        assert moved or any(part in name for part in idle), name


def test_a_score_that_is_not_finite_is_refused_with_the_ids(module, data):
    lm = InlineLM()
    lm.score = lambda prefixes, _: [ContinuationScore(np.array([np.nan], np.float32)) for _ in prefixes]
    pipeline = pipeline_for(module, data, lm)
    pipeline.advance(0, IndexState(0, 0))
    first = data.queries.examples(pipeline.state()[0].query_rows[:1])[0].id
    with pytest.raises(RunError, match=rf"text {first} after document text-\d+#\d+ is nan"):
        pipeline.take(0)


def test_the_learning_rate_rises_then_falls_to_zero():
    settings = TrainConfig(max_steps=100)
    factors = [learning_rate_factor(step, settings) for step in range(101)]
    assert factors[:10] == sorted(factors[:10]) and 0 < factors[0] < 0.2
    assert factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[99] > 0 and factors[100] == 0


# Other settings of the loss ------------------------------------------------------------------------------


def loss_of(module: LSRModule) -> float:
    return float(module.training_step(Position(0), 0).detach())


def test_the_contrastive_term_and_the_batchs_other_documents_add_their_part_to_the_loss(debug_config, data):
    plain, contrastive = (
        loss_of(module_given(debug_config, data, loss={"contrastive": weight})) for weight in (0.0, 0.5)
    )
    module = module_given(debug_config, data, loss={"contrastive": 0.5})
    own, others = module.similarities(batch_of().retrieved)
    log_p, best = torch.cat([own, others], 1).detach() / debug_config.loss.gamma, torch.tensor([2, 1])
    log_p = log_p.log_softmax(1)[torch.arange(2), best]
    assert contrastive == pytest.approx(plain - 0.5 * float(log_p.mean()), rel=1e-5)


def test_a_prefix_is_a_unit_vector_again_unless_similarities_are_inner_products():
    vectors = torch.tensor([[3.0, 4.0, 12.0]]) / 13
    assert first_numbers(vectors, 2, "cosine").tolist() == [pytest.approx([0.6, 0.8])]
    assert first_numbers(vectors, 2, "dot").tolist() == [pytest.approx([3 / 13, 4 / 13])]


@pytest.mark.parametrize("dims", [None, 8])
def test_similarities_are_of_the_dimensions_of_the_index(debug_config, data, dims):
    searched, every = (module_given(debug_config, data, index={"dims": of}) for of in (dims, None))
    rows = batch_of().retrieved
    queries = [example.query for example in data.queries.examples(rows.query_rows)]
    documents = np.stack([every.encoder.encode_document(data.corpus.texts(of)).numpy() for of in rows.doc_rows])
    q, d = (of[..., :dims] for of in (encoded_queries(every, queries), documents))
    q, d = (of / np.linalg.norm(of, axis=-1, keepdims=True) for of in (q, d))
    similarities = searched.similarities(rows)[0].detach().numpy()
    np.testing.assert_allclose(similarities, np.einsum("bd,bkd->bk", q, d), atol=1e-5)
    np.testing.assert_allclose(encoded_queries(searched, queries), q, rtol=1e-5)


# Numbers that are not finite -------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_named_with_its_text_and_its_documents(module, data, scored):
    whole = module.similarities
    bad = torch.tensor([2]), torch.tensor(torch.nan)
    module.similarities = lambda batch: (whole(batch)[0].index_put((bad[0],), bad[1]), None)
    text = data.queries.examples(scored.retrieved.query_rows[[2]])[0].id
    documents = ", ".join(document.id for document in data.corpus.documents(scored.retrieved.doc_rows[2]))
    expected = rf"^step 0: the loss of 1 of 4 texts is not finite \(nan\): {text}; documents of the first: {documents};"
    module.training_step(Position(0), 0).backward()
    with pytest.raises(NotFiniteError, match=expected):
        module.on_after_backward()


def test_a_gradient_that_is_not_finite_is_named_with_the_texts_of_its_batch(module, data, scored):
    loss = module.training_step(Position(0), 0)
    loss.backward()
    optimizer = module.configure_optimizers()["optimizer"]
    module.on_before_optimizer_step(optimizer)
    weight = next(weight for weight in module.encoder.parameters() if weight.grad is not None)
    weight.grad.view(-1)[-1] = torch.inf
    texts = ", ".join(example.id for example in data.queries.examples(scored.retrieved.query_rows))
    with pytest.raises(NotFiniteError, match=rf"^step 0: the gradient is not finite; its texts are {texts};"):
        module.on_before_optimizer_step(optimizer)


def test_query_vectors_that_are_not_finite_are_named_before_they_are_searched(module, data):
    def search(*given):
        raise AssertionError("searched")

    pipeline = pipeline_for(module, data, InlineLM(), search=search)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match=r"vectors of 4 of 4 texts are not finite, first [^,]+, [^,]+, [^,]+:"):
        pipeline.advance(0, IndexState(0, 0))


# Under the trainer's autocast only the backbone computes in bfloat16 ---------------------------------------


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
    log_p = log_likelihood(module.similarities(scored.retrieved)[0], 0.02)
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


# Chunks of a step: the whole batch's gradient, the activations of one chunk at a time ----------------------


CHUNK = 64  # padded tokens, of which the step has hundreds


@pytest.fixture
def make(debug_config: Config, data: PreparedSet):
    def make(chunk_tokens: int | None, **loss: object) -> LSRModule:
        torch.manual_seed(0)
        sections = {"train": {"chunk_tokens": chunk_tokens}, "loss": loss}
        module = module_given(debug_config, data, **sections)
        pipeline = pipeline_for(module, data, InlineLM())
        pipeline.advance(0, IndexState(0, 0))
        module.batches = Given(pipeline.take(0))
        return module

    return make


def step(module: LSRModule, parts: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient of the mean over the parts of a batch."""
    losses = []
    for part in range(parts):
        losses.append(module.training_step(Position(0, part, parts), part))
        (losses[-1] / parts).backward()
    gradients = {name: weight.grad for name, weight in module.encoder.named_parameters() if weight.grad is not None}
    return float(torch.stack(losses).detach().mean()), gradients


@pytest.mark.parametrize(
    ("way", "lever"),
    [
        ("parts", {}),
        ("chunks", {}),
        ("chunks", {"contrastive": 0.5}),
    ],
)
def test_the_gradient_in_parts_or_chunks_is_that_of_the_whole_batch(make, way: str, lever) -> None:
    (loss, whole), module = step(make(None, **lever)), make(CHUNK if way == "chunks" else None, **lever)
    other_loss, gradients = step(module, parts=4 if way == "parts" else 1)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    largest = max(float(values.abs().max()) for values in whole.values())
    assert gradients.keys() == whole.keys()
    for name, values in whole.items():
        torch.testing.assert_close(gradients[name], values, rtol=1e-4, atol=1e-6 * largest)


def test_recomputed_passes_have_the_same_bits(make, monkeypatch) -> None:
    """Against passes of the same texts, whose activations are kept."""
    loss, chunked = step(make(CHUNK))
    monkeypatch.setitem(batching.ENCODER_TOKENS_WITH_GRADIENT, "cpu", CHUNK)
    kept_loss, kept = step(make(None))
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


# Nothing waits for the device before its work is launched: on a GPU that computes nothing -----------------------------


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


def test_embedding_and_scoring_wait_for_nothing_but_the_vectors(module, tmp_path, monkeypatch):
    with counted_stops(module.encoder, monkeypatch) as stops:
        module.encoder.encode(["a cat", "the mat and the cat", "a cat on a mat", "two"], tokens_per_batch=8)
    assert stops == ["_to_copy"]
    monkeypatch.setattr("replug.models.local.hf_lm.require_sense", lambda *_: None)
    lm = load(write_llama, tmp_path, tokens_per_batch=40)
    lm.model.set_attn_implementation("sdpa")  # as on a GPU
    with counted_stops(lm.model, monkeypatch) as stops:
        lm.launch(*lm.tokenize(PREFIXES, CONTINUATIONS))
    assert stops == []
