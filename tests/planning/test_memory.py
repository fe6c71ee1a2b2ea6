"""The bytes that a plan tells, beside what was measured and beside files that the stores themselves have written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replug.cluster.layout import Node, lay_out
from replug.config.load import load_config
from replug.config.schema import Config, LoRAConfig
from replug.data.store import PreparedSet
from replug.index_workers.build import build_plan
from replug.index_workers.build_plan import IndexState
from replug.index_workers.builder import Builder
from replug.index_workers.kinds import resolve_kind
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from replug.models.packaged import write_stand_in_encoder
from replug.models.preparing import prepared_set
from replug.planning.memory import (
    host_bytes,
    run_sizes,
    state_bytes,
    train_bytes,
    version_bytes,
)
from replug.planning.model_sizes import encoder_size
from replug.train.trained_weights import choose_trained_weights
from tests.support.command_line import ROOT

CONTRIEVER = encoder_size("facebook/contriever")


def num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


# Gigabytes of 64 x 21 texts of 128 tokens through twelve layers of 768, counted by a step on tensors without data.
MEASURED = [
    ({}, 66.99),
    ({"chunk_tokens": 8192}, 4.94),
    ({"precision": "float32"}, 104.06),
]


@pytest.mark.parametrize(("keys", "gigabytes"), MEASURED)
def test_a_training_step_holds_what_was_measured(paper: Config, keys: dict[str, Any], gigabytes: float) -> None:
    if "precision" in keys:
        keys = {"precision": type(paper.train.precision)(keys["precision"])}
    data = replace(paper.data, context_tokens=126, document_tokens=126)  # beside [CLS] and [SEP]
    config = replace(paper, data=data, train=replace(paper.train, micro_batches=1, **keys))
    planned = train_bytes(config, CONTRIEVER, 1, has_bfloat16=True) / 1e9
    assert 0.99 * gigabytes <= planned <= 1.1 * gigabytes


@pytest.mark.parametrize("rank", [None, 4])
def test_weights_gradients_and_moments_are_those_that_torch_has(
    debug_config: Config, tmp_path: Path, rank: int | None
) -> None:
    write_stand_in_encoder(tmp_path / "encoder", hidden_size=128, num_layers=3)
    retriever = replace(debug_config.retriever, path=str(tmp_path / "encoder"))
    config = replace(debug_config, retriever=retriever, lora=LoRAConfig(rank=rank))
    encoder = load_encoder(retriever)
    choose_trained_weights(config, encoder)
    learning = [weight for weight in encoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning)
    encoder.encode_with_gradient(encoder.token_ids(["mida furo"]))[0, 0].backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = [*encoder.parameters(), *(weight.grad for weight in learning if weight.grad is not None), *moments]
    assert state_bytes(config, encoder_size(retriever.path)) == pytest.approx(sum(t.nbytes for t in held), rel=0.05)


@pytest.fixture(scope="module")
def config() -> Config:
    own = ["data.source=package:numpy_docstrings", "data.document_tokens=64", "data.context_tokens=32"]
    return load_config(ROOT / "configs/debug.yaml", [*own, "data.num_queries=400"])


@pytest.fixture(scope="module")
def prepared(config: Config, tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """Real texts, in the tokens of a stand-in, which are words."""
    return prepared_set(config, tmp_path_factory.mktemp("prepared") / "data")


@pytest.mark.parametrize("kind", ["flat_fp16", "pq", "ivf_sq8"])
def test_an_index_version_takes_the_bytes_estimated(
    kind: str, prepared: PreparedSet, config: Config, tmp_path: Path
) -> None:
    rows, dim, shards = 20_000, 64, 2
    config = replace(config, index=replace(config.index, kind=kind, num_shards=shards))
    store, encoder = VersionStore(tmp_path), load_encoder(config.retriever)
    digest = store.save_snapshot(0, encoder.save)
    small = build_plan(config, encoder, prepared, store, IndexState(0, 0), digest)
    factory = small.kind.factory and resolve_kind(kind, dim, rows, None).factory
    plan = replace(small, num_documents=rows, dim=dim, kind=replace(small.kind, factory=factory))
    random = np.random.default_rng(0)
    files, needs_quantizer, missing_shards = store.begin(plan)
    for file in files:
        store.write_vectors(0, file, random.normal(size=(len(plan.rows_of_file(file)), dim)))
    if needs_quantizer:
        Builder(store.root, 1).make_quantizer(plan)
    for shard in missing_shards:
        Builder(store.root, 1).build_shard(plan, shard)
    store.publish(plan)
    estimated = version_bytes(config, rows, replace(encoder_size("stand_in"), dim=dim))
    assert estimated == pytest.approx(num_bytes(store.folder(0)), rel=0.06)


def test_a_vector_store_holds_its_vectors_itself(paper: Config) -> None:
    config = replace(paper, data=replace(paper.data, corpus="lance:///nowhere?table=docs", source=None))
    assert version_bytes(config, 36_000_000, CONTRIEVER) == 4 * CONTRIEVER.parameters
    layout = lay_out(config, [Node("here", 9, 0, is_driver=True)], roles=["index"])
    assert host_bytes(layout, 36_000_000, has_bfloat16=True) < 6e9
    assert run_sizes(config, 36_000_000, has_bfloat16=True).vectors == 0
