"""The quickstart itself, made very small: real weights, real text, real Ray."""

import json
import math

import pytest
import torch
from transformers import AutoModel

from tests.support.real_models import real_encoder, real_lm

SMALL = [
    "data.num_documents=150",
    "data.num_queries=16",
    "data.num_heldout=4",
    "retrieve.k=3",
    "evaluate.k=2",
    "train.max_steps=4",
    "train.batch_size=2",
    "refresh.every_steps=1",
    "refresh.lag_steps=1",
    "index.block_documents=64",
    "evaluate.num_resamples=100",
]


@pytest.mark.slow
def test_the_quickstart_tunes_a_real_retriever_to_a_real_lm(finish, tmp_path):
    encoder, _ = real_encoder(), real_lm()
    run = tmp_path / "run"
    output = finish(run, *SMALL, config="quickstart")
    assert "0 shared sources, 0 equal texts" in output and "swapped to index v1" in output
    results = json.loads((run / "results.json").read_text())
    assert set(results["bpb"]["all"]) == {"none", "random", "replug", "lsr"}
    assert all(0 < value < 8 and math.isfinite(value) for value in results["bpb"]["all"].values())
    before = AutoModel.from_pretrained(encoder)
    after = AutoModel.from_pretrained(run / "retriever")
    assert not torch.equal(before.embeddings.word_embeddings.weight, after.embeddings.word_embeddings.weight)
    assert not torch.equal(before.encoder.layer[0].output.dense.weight, after.encoder.layer[0].output.dense.weight)
