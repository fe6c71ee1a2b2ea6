"""A number that is not finite ends a run at its step, with the ids it came from, before a checkpoint is replaced."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from replug.config.errors import NotFiniteError
from replug.data.datamodule import Position
from replug.index_workers.build_plan import IndexState
from replug.train.pipeline import BatchPipeline
from replug.train.run_dir import RunDirectory
from tests.support.command_line import arguments
from tests.support.training import InlineLM, pipeline_for


def test_a_loss_that_is_not_finite_is_named_with_its_text_and_its_documents(module, data, scored):
    whole = module.similarities
    bad = torch.tensor([2]), torch.tensor(torch.nan)
    module.similarities = lambda batch: [(whole(batch)[0][0].index_put((bad[0],), bad[1]), None)]
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


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_loss_that_is_not_finite_on_rank_1_alone_ends_both_ranks_with_its_text(replug, tmp_path, monkeypatch):
    """Rank 1 has the last row of the batch, whose sums were finite when they came."""
    run, take = tmp_path / "run", BatchPipeline.take

    def poisoned(pipeline: BatchPipeline, step: int):
        scored = take(pipeline, step)
        sums = scored.sum_logprobs.copy()
        sums[-1] = np.nan
        return replace(scored, sum_logprobs=sums) if step == 5 else scored

    monkeypatch.setattr(BatchPipeline, "take", poisoned)
    ended = replug(*arguments(run, ("resources.train=2",), "train", "debug"))
    assert ended.status == 1
    assert re.search(r"^replug: step 5: the loss of 1 of \d+ texts is not finite \(nan\): \S+; ", ended.errors, re.M)
    assert RunDirectory(run).checkpoint_marks()[-1].step == 4
