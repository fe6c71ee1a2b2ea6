"""Weights are loaded whole or not at all, by every loader, and nothing that comes with a model is run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining, DPRContextEncoder

from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models.build import lm_max_tokens
from replug.models.encoder import Encoder
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.local_source import HuggingFaceSource
from replug.models.model_files import load_tokenizer
from replug.models.packaged import write_stand_in_encoder
from tests.support.dpr_folders import write_dpr
from tests.support.encoder_folders import write_chain, write_json
from tests.support.tiny_lms import write_gpt2, write_llama, write_tokenizer

Weights = dict[str, torch.Tensor]


def write_lm(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        write(folder)
        write_tokenizer(folder)

    return both


LOADERS: dict[str, tuple[Callable[[Path], None], Callable[[str], object]]] = {
    "gpt2": (write_lm(write_gpt2), HuggingFaceLM),
    "llama": (write_lm(write_llama), HuggingFaceLM),
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


def _middle(weights: Weights) -> str:
    return sorted(name for name in weights if "layer" in name or ".h." in name)[3]


DAMAGE = {
    "lacks one": (without_one, "lacks .*, which would be drawn at random"),
    "renamed": (renamed, "lacks .* more, which would be drawn at random"),
    "one layer too many": (with_another_layer, r"holds .*, which a \w+ by its config.json has no use for"),
    "another shape": (of_another_shape, "do not fit its config.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("loader", LOADERS)
def test_weights_that_are_not_the_models_are_refused_by_name(loader: str, damage: str, tmp_path: Path) -> None:
    write, load = LOADERS[loader]
    change, message = DAMAGE[damage]
    write(tmp_path)
    load(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v.clone() for k, v in change(weights).items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"path: .*{message}"):
        load(str(tmp_path))


def test_a_pooler_and_the_heads_of_pretraining_may_be_there_or_not(tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path)
    config = BertConfig.from_pretrained(tmp_path)
    BertForPreTraining(config).save_pretrained(tmp_path)
    assert Encoder(str(tmp_path)).encode(["a text"]).isfinite().all()


# Code that comes with a model -------------------------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({sentinel!r}).touch()
from transformers import BertConfig as Own, BertModel as OwnModel
"""


def with_modules(path: str) -> Encoder:
    """Load a folder of sentence-transformers whose settings ask for trust."""
    write_chain(Path(path), {"pooling_mode": "mean"})
    asking = {name: {"trust_remote_code": True} for name in ("model_args", "config_args", "tokenizer_args")}
    write_json(Path(path) / "sentence_bert_config.json", asking)
    return Encoder(path)


LOADS: dict[str, Callable[[str], object]] = {
    "encoder": Encoder,
    "encoder with modules": with_modules,
    "LM": HuggingFaceLM,
    "LM's limit": lambda path: HuggingFaceSource(path).max_tokens,
    "LM's limit by its section": lambda path: lm_max_tokens(LMConfig(path=path)),
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
    (folder / "own.py").write_text(CODE.format(sentinel=str(sentinel)))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(UserError, match="contains custom code"):
        LOADS[load](str(folder))
    assert not sentinel.exists()
