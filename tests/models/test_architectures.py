"""Every causal LM of transformers gives a pair one score and a prompt one answer, whatever else is in the passes.

The standard is transformers on the input alone: all of it read again for each token, in a model that read nothing else
before, without a cache. And two of the parts: the tanh GELU against what it stands for, and logits in float32.
"""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from replug.models.architecture import WRITTEN_OUT, tried, use_fused_gelu
from replug.models.black_box_lm import Mixture
from replug.models.ensemble import Weighting
from replug.models.generation import GenerationOptions
from replug.models.local import mixtures
from replug.models.local.decoding import ANEW
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.output_layer import Float32Head, target_logprobs
from tests.support.architectures import LEFT_OUT, LIMIT, MAX_TOKENS, write_architecture
from tests.support.lm_answers import mixed
from tests.support.tiny_lms import CONTINUATIONS, PREFIXES, load, write_llama

LETTERS = "qzjxvk"  # one token each: no merges
TOLERANCE = 0.02  # nats; what a text does to another is ten times as much
NEW_TOKENS = 6
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    **{"original_max_position_embeddings": LIMIT, "short_mscale": 1.0, "long_mscale": 1.3},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
# Of families that people have and that went wrong: more often than nightly.
EVERY_DAY: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE}),
    "phimoe with longrope": ("phimoe", {"rope_parameters": LONGROPE}),
    "llama with dynamic rope": ("llama", {"rope_parameters": DYNAMIC}),
}
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - LEFT_OUT)


def letters(count: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(LETTERS, k=count))


def pairs() -> list[tuple[str, str]]:
    """Pairs of all lengths round the limit, some of them choices."""
    lengths = (4, 20, 21, LIMIT - 3, LIMIT - 2, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 30, MAX_TOKENS - 2)
    some = [(letters(length, length), letters(2, number)) for number, length in enumerate(lengths)]
    return some + [(letters(length, 100 + length), letter) for length in (30, LIMIT - 1, LIMIT) for letter in "qz"]


def behind(demonstrations: str) -> list[tuple[str, str]]:
    """Pairs on both sides of the limit that begin with the same tokens."""
    rest = LIMIT - len(demonstrations)
    return [(demonstrations + letters(rest + more, 200 + more), letters(3, more)) for more in (-8, -4, -3, -1, 5, 30)]


DEMONSTRATIONS = letters(70, 7)
PROMPTS = [letters(length, 300 + length) for length in (4, 40, LIMIT - 3, LIMIT - 1, LIMIT, LIMIT + 20)]
FEW_SHOT = [letters(70, 9) + letters(length, 400 + length) for length in (2, 7, 9, 30)]


class Alone:
    """transformers on one input at a time, in a model that read nothing before."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        """Return log-probs [T, V] in float64."""
        if tuple(ids) not in self._known:
            logits = copy.deepcopy(self._model)(torch.tensor([ids]), use_cache=False).logits[0]
            self._known[tuple(ids)] = logits.double().log_softmax(-1)
        return self._known[tuple(ids)]

    def answer(self, ids: list[int], ends: frozenset[int]) -> list[float]:
        """Return the log-probs of the greedy answer's tokens."""
        logprobs: list[float] = []
        while len(logprobs) < NEW_TOKENS and not (logprobs and ids[-1] in ends):
            after = self.logprobs(ids)[-1]
            ids = [*ids, int(after.argmax())]
            logprobs.append(float(after.max()))
        return logprobs


def assert_same(ours: np.ndarray, theirs: Sequence[float] | np.ndarray, about: str) -> None:
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0, err_msg=about)


def fitting(lm: HuggingFaceLM, prompts: Sequence[str], num_more: int = NEW_TOKENS) -> list[str]:
    """Return the prompts that leave room for so many tokens: longrope's end at its limit."""
    return [prompt for prompt in prompts if lm.max_tokens is None or len(prompt) + num_more <= lm.max_tokens]


def check_scores(lm: HuggingFaceLM, alone: Alone) -> None:
    """In one call, in another order with others, behind what all begin with, and alone."""
    shared = behind(DEMONSTRATIONS)
    others = random.Random(0).sample([*pairs(), *shared], 20)
    for group in (pairs(), others, shared, shared[1:], *([pair] for pair in pairs()[4:])):
        if not (some := [pair for pair in group if fitting(lm, ["".join(pair)], 0)]):
            continue
        call = lm.tokenize([prefix for prefix, _ in some], [continuation for _, continuation in some])
        for score, (before, after) in zip(lm.launch(*call).result(), call[0], strict=True):
            expected = alone.logprobs(before + after)[len(before) - 1 : -1]
            about = f"{len(before)} + {len(after)} tokens beside {len(some) - 1}"
            assert_same(score.token_logprobs, expected.gather(1, torch.tensor(after)[:, None])[:, 0].numpy(), about)


def check_answers(lm: HuggingFaceLM, alone: Alone) -> None:
    for prompts in (fitting(lm, some) for some in (PROMPTS, FEW_SHOT, PROMPTS[2:3], FEW_SHOT[1:])):
        answers = lm.generate(prompts, GenerationOptions(NEW_TOKENS))
        for answer, prompt, ids in zip(answers, prompts, lm._prompt_ids(prompts, NEW_TOKENS), strict=True):
            assert_same(answer.token_logprobs, alone.answer(ids, lm._ends), f"after {len(prompt)} of {len(prompts)}")


@torch.inference_mode()
def check_ends(lm: HuggingFaceLM, alone: Alone) -> None:
    """Last tokens of prompts, which move the weights before an answer."""
    end = letters(12, 5)
    for prompts in (fitting(lm, some, len(end) + NEW_TOKENS) for some in (PROMPTS, FEW_SHOT)):
        if not prompts:
            continue
        mixture = Mixture(
            [prompt + end for prompt in prompts], [1 / len(prompts)] * len(prompts), Weighting(0.05, read=9)
        )
        rows = lm._prompt_ids(mixture.prompts, NEW_TOKENS)
        answer = lm._begin(rows, mixture, GenerationOptions(NEW_TOKENS))
        assert answer.num_read == 9
        for ends, ids in zip(lm._grow([answer]).ends, rows, strict=True):
            expected = alone.logprobs(ids)[-10:-1].gather(1, torch.tensor(ids[-9:])[:, None])[:, 0]
            assert_same(ends.numpy(), expected.numpy(), f"the end of {len(ids)} tokens")


def check_samples(lm: HuggingFaceLM) -> None:
    """Drawn together with keys and values that are kept, and each prompt alone without."""
    options, prompts = GenerationOptions(NEW_TOKENS, temperature=1.0, num_samples=2), fitting(lm, [*PROMPTS, *FEW_SHOT])
    together = lm.sample(prompts, options)
    lm._cache_use = ANEW
    for ours, prompt in zip(together, prompts, strict=True):
        for one, other in zip(ours, lm.sample([prompt], options)[0], strict=True):
            assert_same(one.token_logprobs, other.token_logprobs, f"after {len(prompt)} tokens")
            assert one.text == other.text


@pytest.mark.parametrize("name", EVERY_DAY)
def test_families_that_people_have(name: str, tmp_path: Path) -> None:
    kind, given = EVERY_DAY[name]
    check(tmp_path, kind, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family(kind: str, tmp_path: Path) -> None:
    """A new one that fails here may need a line of its own in tests/support/architectures.py."""
    check(tmp_path, kind)


def check(folder: Path, kind: str, **given: Any) -> None:
    write_architecture(folder, kind, **given)
    lm, alone = HuggingFaceLM(str(folder)), Alone(folder)
    check_scores(lm, alone)
    check_answers(lm, alone)
    check_ends(lm, alone)
    check_samples(lm)


def test_a_probe_that_raises_says_no_but_spent_memory_says_nothing() -> None:
    def spent() -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert tried(lambda: [][0], "no") == "no"
    with pytest.raises(torch.OutOfMemoryError):
        tried(spent, False)


@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_every_way_to_write_it_out_is_the_kernel_to_rounding(kind: type[torch.nn.Module]) -> None:
    model = torch.nn.Sequential(kind())
    points = torch.linspace(-12, 12, 20_001, requires_grad=True)
    plain = model(points)
    [slope] = torch.autograd.grad(plain.sum(), points)
    use_fused_gelu(model)
    assert type(model[0]) is torch.nn.GELU
    fused = model(points)
    [fused_slope] = torch.autograd.grad(fused.sum(), points)
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(fused_slope, slope, atol=2e-6, rtol=1e-6)


# Float32 logits of half-precision LMs: against float64, under autocast, and with what models do to their logits.

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_rows", [1, 40, 1100])
def test_logits_and_log_probs_in_pieces_are_exact_to_float32_under_autocast_too(
    dtype: torch.dtype, bias: bool, num_rows: int
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 3000, bias=bias).to(dtype).requires_grad_(False)
    rows, target = (torch.randn(num_rows, 48) * 30).to(dtype), torch.randint(3000, (num_rows,))
    target[0] = 2999
    exact = rows.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    assert (linear(rows).double() - exact).abs().max() > 1e-2  # else the test shows nothing
    logits = Float32Head(linear)(rows.view(1, num_rows, 48))[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Float32Head(linear)(rows.view(1, num_rows, 48))[0], logits)
    found = target_logprobs(rows, target, Float32Head(linear))
    assert found.dtype == torch.float32 and (found <= 0).all()
    expected = exact.log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_what_a_model_does_to_its_logits_is_done_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    write_architecture(tmp_path, "gemma2", final_logit_softcapping=5.0)
    lm = HuggingFaceLM(str(tmp_path), dtype=dtype)
    assert lm._head is None  # its logits are more than a product
    with torch.inference_mode():
        logits = lm.model(torch.arange(40)[None]).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(dtype).float())
    assert all(np.isfinite(score.token_logprobs).all() for score in lm.score(PREFIXES, CONTINUATIONS))


@pytest.mark.parametrize("dtype", HALF)
def test_a_half_precision_lm_scores_and_continues_with_float32_logits(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(write_llama, tmp_path, dtype=dtype)
    assert isinstance(lm._head, Float32Head)
    whole = HuggingFaceLM(str(tmp_path), dtype=dtype)
    whole._head, whole._shares = None, False
    for a, b in zip(lm.score(PREFIXES, CONTINUATIONS), whole.score(PREFIXES, CONTINUATIONS), strict=True):
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)
    seen, mix = [], mixtures.mix_next_token
    monkeypatch.setattr(mixtures, "mix_next_token", lambda logits, w: seen.append(logits.dtype) or mix(logits, w))
    for way in (lm, whole):
        mixed(way, ["the cat sat", "x"], [0.5, 0.5], GenerationOptions(3))
    assert set(seen) == {torch.float32}
