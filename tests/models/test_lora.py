"""Adapters of an encoder: what learns, what others are given, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, MPNetConfig, MPNetModel

from replug.config.errors import UserError
from replug.config.schema import LoRAConfig, RetrieverConfig
from replug.data.folder import checksum_problems
from replug.models.encoder import ADAPTER, Encoder
from replug.models.packaged import write_stand_in_encoder
from replug.train.trained_weights import adapter_settings, add_adapters, save_retriever

TEXTS = ["mida furo", "pelo mida", "tana furo mida"]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_stand_in_encoder(folder)
    return folder


def adapted(folder: Path, lora: LoRAConfig | None = None) -> Encoder:
    """With adapters that do something: B begins at 0."""
    encoder = Encoder(str(folder))
    add_adapters(encoder.backbones[0], lora or LoRAConfig(rank=4), seed=0)
    torch.manual_seed(1)
    for name, weight in encoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return encoder


def trained(model: torch.nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def test_the_same_seed_draws_the_same_adapters_and_nobody_elses_numbers(encoder_folder):
    state = torch.random.get_rng_state()
    first, again = adapted(encoder_folder).state_dict(), adapted(encoder_folder).state_dict()
    torch.random.set_rng_state(state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    encoder = Encoder(str(encoder_folder))
    add_adapters(encoder.backbones[0], LoRAConfig(rank=4), seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    add_adapters(other := Encoder(str(encoder_folder)).backbones[0], LoRAConfig(rank=4), seed=1)
    drawn = "encoder.layer.0.attention.self.query.lora_A.default.weight"
    assert not torch.equal(other.state_dict()[drawn], encoder.backbones[0].state_dict()[drawn])


def test_merged_weights_give_the_same_vectors_under_the_architectures_names_and_leave_the_adapters_as_they_are(
    encoder_folder, tmp_path
):
    encoder = adapted(encoder_folder)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.save(tmp_path / "merged")
    found, plain = Encoder(str(tmp_path / "merged")), Encoder(str(encoder_folder))
    np.testing.assert_allclose(found.encode(TEXTS), encoder.encode(TEXTS), rtol=0, atol=1e-6)
    assert not torch.allclose(found.encode(TEXTS), plain.encode(TEXTS), atol=1e-2)
    assert found.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_peft_loads_the_adapter_that_is_kept_beside_the_merged_weights(encoder_folder, tmp_path):
    from peft import PeftModel

    encoder = adapted(encoder_folder)
    encoder.save(tmp_path / "merged")
    assert "adapter/adapter_model.safetensors" in json.loads((tmp_path / "merged/checksums.json").read_text())["files"]
    by_peft = PeftModel.from_pretrained(AutoModel.from_pretrained(encoder_folder), tmp_path / "merged" / ADAPTER)
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.inference_mode():
        expected = encoder.backbones[0](ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        found = by_peft(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_an_adapter_is_kept_for_a_copy_of_the_merged_weights(encoder_folder, tmp_path):
    adapted(encoder_folder).save(tmp_path / "best")
    best = Encoder(str(tmp_path / "best"))
    save_retriever(tmp_path / "tuned", best, RetrieverConfig("stand_in"), source=tmp_path / "best")
    assert {path.name for path in (tmp_path / "tuned" / ADAPTER).iterdir()} >= {"adapter_config.json"}
    assert checksum_problems(tmp_path / "tuned") == []


def test_an_architecture_that_peft_does_not_know_is_refused():
    config = MPNetConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(UserError, match="peft does not know which layers of mpnet to adapt"):
        adapter_settings(MPNetModel(config, add_pooling_layer=False), LoRAConfig(rank=2))
