"""The sizes of models, and the bytes that a plan tells beside what was measured and what the stores have written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replug.cluster.layout import Node, lay_out
from replug.config.choices import Precision
from replug.config.errors import UserError
from replug.config.schema import Config, LoRAConfig
from replug.index_workers.build import build_plan
from replug.index_workers.build_plan import IndexState
from replug.index_workers.kinds import resolve_kind
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from replug.planning import model_sizes
from replug.planning.memory import host_bytes, run_sizes, state_bytes, train_bytes, version_bytes
from replug.planning.model_sizes import encoder_size, lm_size
from replug.train.trained_weights import choose_trained_weights
from tests.support.encoder_folders import WIDTH, write_chain, write_encoder, write_static
from tests.support.index_versions import publish
from tests.support.preparing import debug_set

CONTRIEVER = encoder_size("facebook/contriever")


def num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("keys", "gigabytes"), [({}, 66.99), ({"chunk_tokens": 8192}, 4.94), ({"precision": Precision.float32}, 104.06)]
)
def test_a_training_step_holds_what_was_measured(paper: Config, keys: dict[str, Any], gigabytes: float) -> None:
    """Gigabytes of 64 x 21 texts of 128 tokens through twelve layers of 768, counted by a step on fake tensors."""
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


@pytest.mark.parametrize("kind", ["flat_fp16", "pq", "ivf_sq8"])
def test_an_index_version_takes_the_bytes_estimated(kind: str, debug_config: Config, tmp_path: Path) -> None:
    rows, dim = 20_000, 64
    config = replace(debug_config, index=replace(debug_config.index, kind=kind, num_shards=2))
    store, encoder = VersionStore(tmp_path / "index"), load_encoder(config.retriever)
    digest = store.save_snapshot(0, encoder.save)
    small = build_plan(config, encoder, debug_set(tmp_path), store, IndexState(0, 0), digest)
    factory = small.kind.factory and resolve_kind(kind, dim, rows, None).factory
    plan = replace(small, num_documents=rows, dim=dim, kind=replace(small.kind, factory=factory))
    store.begin(plan)
    publish(store, plan, np.random.default_rng(0).normal(size=(rows, dim)))
    estimated = version_bytes(config, rows, replace(encoder_size("stand_in"), dim=dim))
    assert estimated == pytest.approx(num_bytes(store.folder(0)), rel=0.06)


def test_a_vector_store_holds_its_vectors_itself(paper: Config) -> None:
    config = replace(paper, data=replace(paper.data, corpus="lance:///nowhere?table=docs", source=None))
    assert version_bytes(config, 36_000_000, CONTRIEVER) == 4 * CONTRIEVER.parameters
    layout = lay_out(config, [Node("here", 9, 0, is_driver=True)], roles=["index"])
    assert host_bytes(layout, 36_000_000, has_bfloat16=True) < 6e9
    assert run_sizes(config, 36_000_000, has_bfloat16=True).vectors == 0


# Sizes of models -----------------------------------------------------------------------------------------------------

PUBLISHED = [  # millions of parameters, as their model cards have them
    (lm_size, "gpt2-xl", 1557.6),
    (lm_size, "package:smollm2", 134.5),
    (encoder_size, "facebook/contriever", 108.9),
    (encoder_size, "package:minilm", 22.6),
]


@pytest.mark.parametrize(("size_of", "name", "millions"), PUBLISHED)
def test_a_model_has_the_parameters_of_its_model_card(size_of: Callable, name: str, millions: float) -> None:
    assert size_of(name).parameters / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_local_config_gives_the_size_of_an_unknown_model(tmp_path: Path) -> None:
    fields = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    fields |= {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}
    rope = {"hidden_act": "silu", "rope_parameters": {}, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **rope}))
    assert lm_size(str(tmp_path)).parameters == lm_size("package:smollm2").parameters


def test_a_model_that_was_fetched_from_the_hub_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    fields |= {"intermediate_size": 3072, "vocab_size": 151_936, "head_dim": 128, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "rope_theta": 1e6}))
    monkeypatch.setattr(model_sizes, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert lm_size("Qwen/Qwen3-0.6B").parameters / 1e6 == pytest.approx(596.0, rel=0.005)


def test_a_size_that_nothing_tells_is_refused_by_its_key_and_how_to_fetch_it(tmp_path: Path) -> None:
    for size_of, key in ((lm_size, "lm.path"), (encoder_size, "retriever.path")):
        with pytest.raises(UserError, match=rf"{key}: .*hf download acme/model config\.json"):
            size_of("acme/model")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}))
    with pytest.raises(UserError, match=r"lm\.path: .*config\.json has none of num_hidden_layers"):
        lm_size(str(tmp_path))


def test_the_width_is_that_of_the_encoder_itself(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    plain = encoder_size(str(tmp_path))
    write_chain(tmp_path, {"pooling_mode": "cls"}, ["Dense", "Normalize"])
    found, encoder = encoder_size(str(tmp_path)), Encoder(str(tmp_path))
    assert (found.dim, plain.dim) == (encoder.width, WIDTH)
    modules = encoder.sides["document"].modules[1:]
    dense = sum(weight.numel() for part in modules for weight in part.parameters() if weight.dim() == 2)
    assert found.parameters - plain.parameters == dense


def test_a_static_encoder_has_a_row_for_each_token(tmp_path: Path) -> None:
    write_static(tmp_path / "static", layers=["Dense"])
    size, encoder = encoder_size(str(tmp_path / "static")), Encoder(str(tmp_path / "static"))
    assert (size.dim, size.vocabulary) == (encoder.width, encoder.token_rule.vocab_size)
