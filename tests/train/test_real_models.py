"""Both quickstarts, made very small: real weights, real text, real Ray."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from replug.models.encoder import Encoder
from tests.support.real_models import real_encoder, real_lm
from tests.support.runs import heldout_bits

SMALL = [
    "data.num_documents=150",
    "data.num_queries=16",
    "data.num_heldout=4",
    "retrieve.k=3",
    "evaluate.k=2",
    "train.batch_size=2",
    "index.block_documents=64",
    "evaluate.num_resamples=100",
]
ONLINE = [*SMALL, "train.max_steps=4", "refresh.every_steps=1", "refresh.lag_steps=1"]
ON_LABELS = [*SMALL, "data.num_dev=4", "label.dense=2", "label.bm25=1", "label.tuned=1", "train.epochs=1"]


def require_measured(run: Path) -> None:
    bits = heldout_bits(run)
    assert set(bits) == {"none", "random", "replug", "lsr"}
    assert all(0 < value < 8 and math.isfinite(value) for value in bits.values())


@pytest.mark.slow
def test_the_papers_loop_tunes_a_real_retriever_to_a_real_lm(finish, tmp_path):
    encoder, _ = real_encoder(), real_lm()
    run = tmp_path / "run"
    output = finish(run, *ONLINE, config="quickstart_online")
    assert "0 shared sources, 0 equal texts" in output and "swapped to index v1" in output
    require_measured(run)
    before = AutoModel.from_pretrained(encoder)
    after = AutoModel.from_pretrained(run / "retriever")
    assert not torch.equal(before.embeddings.word_embeddings.weight, after.embeddings.word_embeddings.weight)
    assert not torch.equal(before.encoder.layer[0].output.dense.weight, after.encoder.layer[0].output.dense.weight)


@pytest.mark.slow
def test_the_quickstart_tunes_real_queries_twice_on_a_real_lms_labels(finish, tmp_path):
    encoder, _ = real_encoder(), real_lm()
    run = tmp_path / "run"
    output = finish(run, *ON_LABELS, config="quickstart")
    assert "0 shared sources, 0 equal texts" in output
    require_measured(run)
    texts = ["a boat", "a ship"]
    before, first, tuned = (Encoder(str(path)) for path in (encoder, run / "first", run))
    assert tuned.encode_document(texts).equal(before.encode_document(texts))
    assert not first.encode_query(texts).equal(before.encode_query(texts))
