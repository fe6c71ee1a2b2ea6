"""Weights are loaded whole or not at all, by every loader, and nothing that comes with a model is run."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModelForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    DPRContextEncoder,
    ElectraForPreTraining,
    Qwen3ForCausalLM,
    T5ForConditionalGeneration,
)

from replug.config.errors import UserError
from replug.models.encoder import Encoder
from replug.models.local.hf_lm import HuggingFaceLM, HuggingFaceSource
from replug.models.model_files import load_lm_tokenizer, load_tokenizer
from replug.models.packaged import write_stand_in_encoder
from tests.support.architectures import write_architecture
from tests.support.encoder_folders import config_of, write_chain, write_dpr, write_encoder, write_json
from tests.support.tiny_lms import write_gpt2, write_llama, write_with_tokenizer

Weights = dict[str, torch.Tensor]


LOADERS: dict[str, tuple[Callable[[Path], None], Callable[[str], object]]] = {
    "gpt2": (partial(write_with_tokenizer, write_gpt2), HuggingFaceLM),
    "llama": (partial(write_with_tokenizer, write_llama), HuggingFaceLM),
    "bert": (write_stand_in_encoder, Encoder),
    "dpr": (lambda folder: write_dpr(folder, DPRContextEncoder, seed=3), Encoder),
}


def without_one(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if name != _middle(weights)}


def renamed(weights: Weights) -> Weights:
    return {f"module.{name}": weight for name, weight in weights.items()}


def with_another_layer(weights: Weights) -> Weights:
    """As where config.json says that there is a layer less."""
    return weights | {name.replace(".1.", ".2."): weight for name, weight in weights.items() if ".1." in name}


def of_another_shape(weights: Weights) -> Weights:
    return weights | {_middle(weights): torch.zeros(7)}


def with_another_norm(weights: Weights) -> Weights:
    """Leave weights as if config.json named an architecture with fewer parts."""
    return weights | {f"{_middle(weights).partition('.1.')[0]}.1.another_norm.weight": torch.ones(7)}


def _middle(weights: Weights) -> str:
    return sorted(name for name in weights if ".1." in name and name.endswith("weight"))[3]


NO_USE = r"holds .*, which \w+ by its config.json does not use"
DAMAGE = {
    "lacks one": (without_one, "lacks .*, which would be drawn at random"),
    "renamed": (renamed, "lacks .* more, which would be drawn at random"),
    "one layer too many": (with_another_layer, NO_USE),
    "another norm": (with_another_norm, NO_USE),
    "another shape": (of_another_shape, "cannot load"),
}


@pytest.mark.parametrize(
    ("loader", "damage"),
    [
        *(("llama", damage) for damage in DAMAGE),
        *(("bert", damage) for damage in DAMAGE),
        *(("gpt2", "lacks one"), ("dpr", "lacks one"), ("dpr", "another norm")),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(loader: str, damage: str, tmp_path: Path) -> None:
    write, load = LOADERS[loader]
    change, message = DAMAGE[damage]
    write(tmp_path)
    load(str(tmp_path))
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=f"path: .*{message}"):
        load(str(tmp_path))


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file({name: weight.clone() for name, weight in change(load_file(file)).items()}, file, {"format": "pt"})


PLAIN_MEAN = {"pooling_mode_mean_tokens": True}
TEXTS = ["w1 w2 w3", "w5 w6 w7 w8 w9 w10"]
HEADS: dict[str, tuple[str, Any]] = {
    "BERT": ("bert", BertForPreTraining),
    "reranker": ("bert", BertForSequenceClassification),
    "ELECTRA": ("electra", ElectraForPreTraining),
    "Qwen": ("qwen3", Qwen3ForCausalLM),
    "T5": ("t5", T5ForConditionalGeneration),
    **{name: (name, AutoModelForMaskedLM.from_config) for name in ("modernbert", "mpnet", "xlm-roberta")},
}


def write_with_head(folder: Path, head: str) -> str:
    """Write a model as it lies on the hub, with its head, and return the prefix of the encoder's own weights."""
    architecture, kind = HEADS[head]
    write_encoder(folder, architecture)
    torch.manual_seed(3)
    model = kind(config_of(architecture))
    model.save_pretrained(folder)
    if architecture in ("qwen3", "t5"):  # a plain folder of them is no encoder
        write_chain(folder, PLAIN_MEAN)
    return f"{model.base_model_prefix}."


@pytest.mark.parametrize("head", HEADS)
def test_a_head_of_pretraining_is_named_in_a_warning_and_changes_no_vector(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_with_head(tmp_path, head)
    vectors = Encoder(str(tmp_path)).encode(TEXTS)
    if not head.endswith("T5"):  # whose decoder transformers leaves out without a word
        [record] = [record for record in caplog.records if record.name == "replug.models.model_files"]
        assert re.match(r"retriever.path: .* holds .*, which \w+ does not read$", record.getMessage())
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, theirs, atol=1e-6)
    rewrite(tmp_path, lambda weights: {name.removeprefix(prefix): weight for name, weight in weights.items()})
    assert torch.equal(Encoder(str(tmp_path)).encode(TEXTS), vectors)


def test_names_and_tables_of_the_first_berts_are_read(tmp_path: Path) -> None:
    prefix = write_with_head(tmp_path, "BERT")
    vectors = Encoder(str(tmp_path)).encode(TEXTS)

    def aged(weights: Weights) -> Weights:
        names = {name: re.sub(r"Norm\.weight$", "Norm.gamma", name) for name in weights if "pooler" not in name}
        renamed = {re.sub(r"Norm\.bias$", "Norm.beta", names[name]): weights[name] for name in names}
        assert not renamed.keys() >= names.keys()
        return renamed | {f"{prefix}embeddings.position_ids": torch.arange(40)[None]}

    rewrite(tmp_path, aged)
    assert torch.equal(Encoder(str(tmp_path)).encode(TEXTS), vectors)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize(("kind", "place"), [("gptj", "attn"), ("gpt_neo", "attn.attention")])
def test_masks_that_earlier_versions_saved_are_no_weights(kind: str, place: str, prefix: str, tmp_path: Path) -> None:
    write_architecture(tmp_path, kind)
    [expected] = HuggingFaceLM(str(tmp_path)).score(["the cat"], [" sat on the mat"])
    masks = {f"{prefix}h.{layer}.{place}.masked_bias": torch.tensor(-1e9) for layer in range(4)}
    masks |= {f"{prefix}h.{layer}.{place}.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(4)}
    rewrite(tmp_path, lambda weights: {prefix + n.removeprefix("transformer."): w for n, w in weights.items()} | masks)
    [score] = HuggingFaceLM(str(tmp_path)).score(["the cat"], [" sat on the mat"])
    assert score.sum_logprob == expected.sum_logprob


def with_chain(path: str) -> Encoder:
    write_chain(Path(path), PLAIN_MEAN)
    return Encoder(path)


@pytest.mark.parametrize("load", [Encoder, with_chain, load_lm_tokenizer])
def test_an_adapter_beside_weights_is_refused_whether_or_not_peft_is_installed(
    load: Callable[[str], object], tmp_path: Path
) -> None:
    """transformers applies it where it finds peft, and else says nothing."""
    write_with_tokenizer(write_llama, tmp_path) if load is load_lm_tokenizer else write_encoder(tmp_path, "bert")
    load(str(tmp_path))
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(UserError, match=r"path: .* holds an adapter .*merge it into them"):
        load(str(tmp_path))


# Code that comes with a model -------------------------------------------------------------------------------


def with_modules(path: str) -> Encoder:
    """Load a folder of sentence-transformers whose settings ask for trust."""
    write_chain(Path(path), PLAIN_MEAN)
    asking = {name: {"trust_remote_code": True} for name in ("model_args", "config_args", "tokenizer_args")}
    write_json(Path(path) / "sentence_bert_config.json", asking)
    return Encoder(path)


LOADS: dict[str, Callable[[str], object]] = {
    "encoder": Encoder,
    "encoder with modules": with_modules,
    "LM": HuggingFaceLM,
    "LM's limit": lambda path: HuggingFaceSource(path).max_tokens,
    "tokenizer": load_tokenizer,
}


@pytest.mark.parametrize("load", LOADS)
def test_code_in_a_models_folder_is_never_run_even_where_somebody_says_yes(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sentinel = tmp_path / "model", tmp_path / "ran"
    write_stand_in_encoder(folder)
    classes = {"AutoConfig": "own.Own", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnModel"}
    for name, own in (("config.json", classes), ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", None]})):
        content = json.loads((folder / name).read_text())
        content |= {"model_type": "own", "tokenizer_class": "Own", "auto_map": own}
        (folder / name).write_text(json.dumps(content))
    models = "from transformers import BertConfig as Own, BertModel as OwnModel"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(sentinel)!r}).touch()\n{models}\n")
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(UserError, match=r"custom code .*replug runs no code"):
        LOADS[load](str(folder))
    assert not sentinel.exists()
