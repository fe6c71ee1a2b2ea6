"""GPUs that torch cannot use are told; and an LM whose layers lie on two of them, on devices that compute nothing.

GPT-2's output layer is its embedding, on the first GPU, while its last layer is on the second; Llama's lies last.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import replug.models.hardware
from replug.commands.doctor import cuda
from replug.commands.prepare import make_index
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.models import model_files
from replug.models.generation import GenerationOptions
from replug.models.hardware import check_gpus, default_device, unusable_gpus
from replug.models.local import decoding, hf_lm, mixtures
from replug.models.local.decoding import PACKED
from replug.models.local.hf_lm import HuggingFaceLM
from replug.train.run import train
from tests.models.fake_devices import fake_gpus, spread
from tests.support.lm_answers import mixed
from tests.support.tiny_lms import CONTINUATIONS, DEMONSTRATIONS, PREFIXES, gpt2, llama, write_tokenizer

PLACES = {
    llama: {
        **dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0"], "cuda:0"),
        **dict.fromkeys(["model.layers.1", "model.norm", "lm_head"], "cuda:1"),
    },
    gpt2: {
        **dict.fromkeys([f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.0")], "cuda:0"),
        **{"transformer.h.1": "cuda:1", "transformer.ln_f": "cuda:1", "lm_head": "cuda:0"},
    },
}


@pytest.fixture(
    params=[(make, dtype) for make in PLACES for dtype in (torch.float32, torch.bfloat16)],
    ids=lambda case: f"{case[0].__name__}-{case[1]}",
)
def lm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceLM]:
    make, dtype = request.param
    write_tokenizer(tmp_path)
    with fake_gpus(monkeypatch):
        # What compares values has none here.
        monkeypatch.setattr(decoding, "same_direction", lambda a, b: (a == b).shape == a.shape)
        monkeypatch.setattr(hf_lm, "find_cache_use", lambda model: PACKED)
        model = spread(make().eval(), PLACES[make], dtype)
        model.config.save_pretrained(tmp_path)
        monkeypatch.setattr(hf_lm, "load_causal_lm", lambda *_: model)
        yield HuggingFaceLM(str(tmp_path), dtype=dtype, spread=True)


@pytest.mark.slow
def test_it_scores_after_a_prefix_that_all_share(lm: HuggingFaceLM) -> None:
    prefixes = [f"{DEMONSTRATIONS}{text}" for text in ("a mat", "x", "the cat slept, and")]
    before = lm.counts["tokens"]
    assert len(lm.score(prefixes, [" sat", " on", "!"])) == 3
    assert lm.counts["tokens"] - before < 2 * len(lm.tokenizer(DEMONSTRATIONS)["input_ids"])


@pytest.mark.slow
def test_it_scores_through_its_whole_forward_pass(lm: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "unique", lambda self: self)  # how many there are is a value
    lm._head, lm._shares = None, False
    assert len(lm.score(PREFIXES, CONTINUATIONS)) == len(PREFIXES)


@pytest.mark.slow
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


# Layers that do not fit on the GPUs, and GPUs that torch cannot use


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
    assert all(part in str(caught.value) for part in ("lm.path", "1 of its 3", "model.layers.1"))
    model.hf_device_map["model.layers.1"] = 1
    assert model_files.load_causal_lm("big", torch.float32, "auto") is model


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver with one GPU, and a torch that finds none."""

    def install(has_driver: bool = True, devices: tuple[str, ...] = ("nvidia0",)) -> Path:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(replug.models.hardware, "DRIVER", tmp_path / "version")
        monkeypatch.setattr(replug.models.hardware, "DEVICES", tmp_path)
        for name in devices:
            (tmp_path / name).touch()
        if has_driver:
            (tmp_path / "version").touch()
        return tmp_path

    return install


def test_gpus_that_torch_cannot_use_are_told_with_its_version_and_the_fix(driver):
    driver()
    with pytest.raises(UserError, match=r"torch .* with CUDA .*docs/clusters\.md") as caught:
        check_gpus()
    assert str(caught.value).endswith("hide the GPUs: CUDA_VISIBLE_DEVICES= replug ...")
    assert not cuda().is_ok


@pytest.mark.parametrize(
    ("has_driver", "devices", "visible"),
    [(False, ("nvidia0",), "0"), (True, ("nvidiactl",), "0"), (True, ("nvidia0",), ""), (True, ("nvidia0",), "-1")],
)
def test_a_machine_without_a_driver_or_a_device_or_with_hidden_ones_runs_on_the_cpu(
    driver, monkeypatch, has_driver, devices, visible
):
    driver(has_driver, devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_gpus()
    assert unusable_gpus() is None and default_device().type == "cpu"


def test_no_command_begins_beside_gpus_that_torch_cannot_use(driver, debug_config: Config, tmp_path):
    driver()
    debug_config.run_dir = str(tmp_path / "run")
    for command in (train, make_index):
        with pytest.raises(UserError, match="GPUs are here"):
            command(debug_config)
    assert not (tmp_path / "run").exists()
