"""An LM whose layers lie on two GPUs, and float32 logits there: on devices that compute nothing.

GPT-2's output layer is its embedding, on the first GPU, while its last layer is on the second; Llama's lies last.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from replug.config.errors import UserError
from replug.models import model_files
from replug.models.generation import GenerationOptions
from replug.models.local import decoding, hf_lm, mixtures
from replug.models.local.decoding import PACKED
from replug.models.local.hf_lm import HuggingFaceLM
from tests.models.fake_devices import fake_gpus, spread
from tests.support.lm_answers import mixed
from tests.support.tiny_lms import CONTINUATIONS, DEMONSTRATIONS, MAX_TOKENS, PREFIXES, VOCABULARY, write_tokenizer

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}


def untied_llama(dtype: torch.dtype) -> PreTrainedModel:
    config = LlamaConfig(
        **SIZES, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_TOKENS, tie_word_embeddings=False,
    )  # fmt: skip
    first = ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
    last = ["model.layers.1", "model.norm", "lm_head"]
    places = dict.fromkeys(first, "cuda:0") | dict.fromkeys(last, "cuda:1")
    return spread(LlamaForCausalLM(config).eval(), places, dtype)


def tied_gpt2(dtype: torch.dtype) -> PreTrainedModel:
    config = GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_TOKENS)
    first = [f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.0")]
    places = dict.fromkeys(first, "cuda:0") | {"transformer.h.1": "cuda:1", "transformer.ln_f": "cuda:1"}
    return spread(GPT2LMHeadModel(config).eval(), {**places, "lm_head": "cuda:0"}, dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lm")
    write_tokenizer(path)
    return path


@pytest.fixture(
    params=[(make, dtype) for make in (untied_llama, tied_gpt2) for dtype in (torch.float32, torch.bfloat16)],
    ids=lambda case: f"{case[0].__name__}-{case[1]}",
)
def lm(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceLM]:
    make, dtype = request.param
    with fake_gpus(monkeypatch):
        # What compares values has none here.
        monkeypatch.setattr(decoding, "same_direction", lambda a, b: (a == b).shape == a.shape)
        monkeypatch.setattr(hf_lm, "find_cache_use", lambda model: PACKED)
        model = make(dtype)
        model.config.save_pretrained(folder)
        monkeypatch.setattr(hf_lm, "load_causal_lm", lambda *_: model)
        yield HuggingFaceLM(str(folder), dtype=dtype, spread=True)


def test_it_scores_after_a_prefix_that_all_share(lm: HuggingFaceLM) -> None:
    prefixes = [f"{DEMONSTRATIONS}{text}" for text in ("a mat", "x", "the cat slept, and")]
    before = lm.counts["tokens"]
    assert len(lm.score(prefixes, [" sat", " on", "!"])) == 3
    assert lm.counts["tokens"] - before < 2 * len(lm.tokenizer(DEMONSTRATIONS)["input_ids"])


def test_it_scores_through_its_whole_forward_pass(lm: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "unique", lambda self: self)  # how many there are is a value
    lm._head, lm._shares = None, False
    assert len(lm.score(PREFIXES, CONTINUATIONS)) == len(PREFIXES)


def test_it_continues_prompts(lm: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = []

    def choose(_: object, logprobs: torch.Tensor) -> int:
        logits.append(logprobs)
        return 7

    monkeypatch.setattr(mixtures.TokenChooser, "choose", choose)
    monkeypatch.setattr(torch.Tensor, "__float__", lambda _: -1.0)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: True)
    answer = mixed(lm, ["the cat sat", "x"], [0.5, 0.5], GenerationOptions(3))
    assert len(answer.token_logprobs) == 3
    assert all(row.dtype == torch.float32 for row in logits)


# Layers that do not fit on the GPUs ------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["cpu", "disk"])
def test_layers_outside_of_the_gpus_are_refused_with_what_they_need(
    outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    model.base_model_prefix = "model"
    monkeypatch.setattr(torch.nn.Linear, "base_model", property(lambda own: own), raising=False)
    model.hf_device_map = {"model.embed": 0, "model.layers.0": 1, "model.layers.1": outside}
    report: dict[str, list] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    loader = SimpleNamespace(from_pretrained=lambda *_, **__: (model, report))
    monkeypatch.setattr(model_files, "AutoModelForCausalLM", loader)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError) as caught:
        model_files.load_causal_lm("big", torch.float32, "auto")
    message = str(caught.value)
    for part in ("lm.path", "1 of its 3", "model.layers.1"):
        assert part in message
    model.hf_device_map["model.layers.1"] = 1
    assert model_files.load_causal_lm("big", torch.float32, "auto") is model
