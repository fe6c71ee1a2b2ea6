"""The weights that learn: gradients, moments and checkpoints of adapters and of sides, and what is saved."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, MPNetConfig, MPNetModel

from replug.config.choices import Similarity, TrainedSide
from replug.config.errors import UserError
from replug.config.schema import Config, LoRAConfig, RetrieverConfig
from replug.data.datamodule import Position
from replug.data.folder import checksum_problems
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.models.build import load_encoder
from replug.models.encoder import ADAPTER, Encoder
from replug.models.packaged import resolve_encoder_path
from replug.train.module import LSRModule
from replug.train.trained_weights import (
    adapter_settings,
    add_adapters,
    bring_back_untrained,
    check_training,
    leave_out_untrained,
    save_retriever,
)
from tests.support.encoder_folders import write_dpr_pair, write_static
from tests.support.training import InlineLM, documents_of, encoded_queries, module_given, pipeline_for


def gradients(module: LSRModule) -> dict[str, torch.Tensor]:
    module.training_step(Position(0), 0).backward()
    return {name: weight.grad for name, weight in module.encoder.named_parameters() if weight.grad is not None}


def test_adapters_alone_have_gradients_moments_and_a_place_in_checkpoints(debug_config, data):
    module = module_given(debug_config, data, lora={"rank": 2})
    optimizer = module.configure_optimizers()["optimizer"]
    assert gradients(module).keys() == {n for n, _ in module.encoder.named_parameters() if ".lora_" in n}
    optimizer.step()
    assert len(optimizer.state) == 8 == len(optimizer.param_groups[0]["params"])
    checkpoint = {"state_dict": module.state_dict()}
    leave_out_untrained(module.encoder, checkpoint)
    assert len(checkpoint["state_dict"]) == 8 and all(".lora_" in name for name in checkpoint["state_dict"])
    other = module_given(debug_config, data, lora={"rank": 2})
    bring_back_untrained(other.encoder, checkpoint)
    other.load_state_dict(checkpoint["state_dict"])
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in other.state_dict().items())


def test_a_checkpoint_of_other_weights_that_learn_is_no_match(debug_config, data):
    module = module_given(debug_config, data, lora={"rank": 2})
    checkpoint = {"state_dict": {name: value for name, value in module.state_dict().items() if "lora_A" not in name}}
    leave_out_untrained(module.encoder, checkpoint)
    bring_back_untrained(module.encoder, checkpoint)
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        module.load_state_dict(checkpoint["state_dict"])
    with pytest.raises(UserError, match=r"retriever.path: its weights"):
        bring_back_untrained(module_given(debug_config, data).encoder, checkpoint)


def test_dimensions_that_an_encoder_lacks_are_refused_before_anything_starts(debug_config, data):
    with pytest.raises(UserError, match=r"index.dims is 64, but vectors of .* have 32 numbers"):
        module_given(debug_config, data, index={"dims": 64})


def test_a_static_encoder_has_no_layers_for_adapters(debug_config, tmp_path):
    write_static(tmp_path / "static")
    config = replace(debug_config, retriever=replace(debug_config.retriever, path=str(tmp_path / "static")))
    check_training(config, encoder := load_encoder(config.retriever))
    config = replace(config, lora=replace(config.lora, rank=2))
    with pytest.raises(UserError, match=r"lora\.rank is set, but .*static is a StaticEmbedding"):
        check_training(config, encoder)


# Sides ---------------------------------------------------------------------------------------------------


def moved(config: Config, data: PreparedSet) -> list[bool]:
    """Whether vectors of queries, and of documents, are others after a step."""
    module = module_given(config, data)
    pipeline_for(module, data, InlineLM()).advance(0, IndexState(0, 0))
    texts = ["mida furo", "furo"]

    def vectors() -> list[np.ndarray]:
        module.encoder.eval()
        return [encoded_queries(module, texts), documents_of(module).encode_document(texts).numpy()]

    before, steps = vectors(), module.configure_optimizers()
    module.training_step(Position(0), 0).backward()
    steps["optimizer"].step()
    return [not np.array_equal(old, new) for old, new in zip(before, vectors(), strict=True)]


def test_a_step_moves_the_side_that_is_trained_and_no_other(
    debug_config: Config, data: PreparedSet, tmp_path: Path
) -> None:
    documents, queries = write_dpr_pair(tmp_path)
    one = debug_config.retriever
    two = replace(one, path=str(documents), query_path=str(queries), similarity=Similarity.dot)
    for retriever in (one, two):
        for side in TrainedSide:
            config = replace(debug_config, retriever=replace(retriever, train=side))
            expected = [side is not TrainedSide.documents, side is not TrainedSide.query]
            assert moved(config, data) == expected, (side, retriever)


def test_documents_that_stay_as_they_are_have_an_encoder_that_is_in_no_checkpoint(debug_config, data):
    module = module_given(debug_config, data, retriever={"train": TrainedSide.query})
    assert module.frozen is not None and module.frozen.encoder is not module.encoder
    module.training_step(Position(0), 0).backward()
    assert all(weight.grad is None for weight in module.frozen.encoder.parameters())
    assert not any(name.startswith("_frozen") for name in module.state_dict())


# Adapters ------------------------------------------------------------------------------------------------

TEXTS = ["mida furo", "pelo mida", "tana furo mida"]


def adapted() -> Encoder:
    """With adapters that do something: B begins at 0."""
    encoder = Encoder("stand_in")
    add_adapters(encoder.backbones[0], LoRAConfig(rank=4), seed=0)
    torch.manual_seed(1)
    for name, weight in encoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return encoder


def test_the_same_seed_draws_the_same_adapters_and_nobody_elses_numbers():
    state = torch.random.get_rng_state()
    first, again = adapted().state_dict(), adapted().state_dict()
    torch.random.set_rng_state(state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    encoder = Encoder("stand_in")
    add_adapters(encoder.backbones[0], LoRAConfig(rank=4), seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    add_adapters(other := Encoder("stand_in").backbones[0], LoRAConfig(rank=4), seed=1)
    drawn = "encoder.layer.0.attention.self.query.lora_A.default.weight"
    assert not torch.equal(other.state_dict()[drawn], encoder.backbones[0].state_dict()[drawn])


def test_merged_weights_give_the_same_vectors_and_the_adapters_are_kept_for_peft_and_for_copies(tmp_path):
    from peft import PeftModel

    encoder, plain = adapted(), Encoder("stand_in")
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.save(tmp_path / "best")
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    found = Encoder(str(tmp_path / "best"))
    np.testing.assert_allclose(found.encode(TEXTS), encoder.encode(TEXTS), rtol=0, atol=1e-6)
    assert not torch.allclose(found.encode(TEXTS), plain.encode(TEXTS), atol=1e-2)
    assert found.state_dict().keys() == plain.state_dict().keys()  # the architecture's own names

    save_retriever(tmp_path / "tuned", found, RetrieverConfig("stand_in"), source=tmp_path / "best")
    assert "adapter/adapter_model.safetensors" in json.loads((tmp_path / "tuned/checksums.json").read_text())["files"]
    assert checksum_problems(tmp_path / "tuned") == []
    base = AutoModel.from_pretrained(resolve_encoder_path("stand_in"))
    by_peft = PeftModel.from_pretrained(base, tmp_path / "tuned" / ADAPTER)
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.inference_mode():
        expected = encoder.backbones[0](ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        states = by_peft(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-6)


def test_an_architecture_that_peft_does_not_know_is_refused():
    config = MPNetConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(UserError, match="peft does not know which layers of mpnet to adapt"):
        adapter_settings(MPNetModel(config, add_pooling_layer=False), LoRAConfig(rank=2))
