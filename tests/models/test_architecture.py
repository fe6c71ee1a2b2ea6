"""The tanh GELU against what it stands for, and logits in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
)

from replug.models.architecture import (
    WRITTEN_OUT,
    use_fused_gelu,
)
from replug.models.generation import GenerationOptions
from replug.models.local import mixtures
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.output_layer import Float32Head, target_logprobs
from tests.support.lm_answers import mixed
from tests.support.tiny_lms import (
    CONTINUATIONS,
    MAX_TOKENS,
    PREFIXES,
    VOCABULARY,
    random_lms_need_make_no_sense,
    write_llama,
    write_tokenizer,
)

__all__ = ["random_lms_need_make_no_sense"]


# The tanh GELU -----------------------------------------------------------------------------------------------------


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


HEAD_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


def capping() -> PreTrainedModel:
    return Gemma2ForCausalLM(
        Gemma2Config(**HEAD_SIZES, head_dim=8, num_key_value_heads=2, final_logit_softcapping=5.0, sliding_window=64)
    )


@pytest.mark.parametrize("dtype", HALF)
def test_what_a_model_does_to_its_logits_is_done_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    capping().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    lm = HuggingFaceLM(str(tmp_path), dtype=dtype)
    assert lm._head is None  # its logits are more than a product
    with torch.inference_mode():
        logits = lm.model(torch.arange(40)[None]).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(dtype).float())
    whole = lm.score(PREFIXES, CONTINUATIONS)
    assert all(np.isfinite(score.token_logprobs).all() for score in whole)


@pytest.mark.parametrize("dtype", HALF)
def test_a_half_precision_lm_scores_and_continues_with_float32_logits(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    write_llama(tmp_path)
    write_tokenizer(tmp_path)
    lm = HuggingFaceLM(str(tmp_path), dtype=dtype)
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
