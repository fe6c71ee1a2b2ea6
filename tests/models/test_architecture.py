"""Fused layers against what they stand for: attention in blocks on windows and masks too, and the tanh GELU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from replug.models import architecture
from replug.models.architecture import (
    CACHE,
    CPU_ATTENTION,
    WRITTEN_OUT,
    blocked_attention,
    use_cpu_attention,
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


@pytest.mark.parametrize(("positions", "block_bytes"), [(64, 4 * 2**20), (3, 1), (1, 2000)])
@pytest.mark.parametrize(
    ("heads", "groups", "length", "keys"), [(4, 4, 7, 7), (6, 2, 9, 9), (6, 2, 5, 12), (4, 1, 2, 9)]
)
def test_it_equals_the_fused_attention(monkeypatch, heads, groups, length, keys, positions, block_bytes):
    monkeypatch.setattr(architecture, "POSITIONS_PER_BLOCK", positions)
    monkeypatch.setattr(architecture, "BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    query = torch.randn(3, heads, length, 8)
    key, value = torch.randn(2, 3, groups, keys, 8)
    mask = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    found, _ = blocked_attention(Module(heads // groups), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))


class Module(torch.nn.Module):
    """Hold the parts of an attention layer that such a function looks at."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8}


def window() -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))


def no_window() -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None))


def one_group() -> GemmaForCausalLM:
    return GemmaForCausalLM(GemmaConfig(**{**SMALL, "num_key_value_heads": 1}))


@pytest.mark.parametrize("make", [window, no_window, one_group])
@pytest.mark.parametrize("padding", [0, 3])
def test_models_with_windows_groups_and_padding_give_what_they_gave(make, padding):
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(0, 99, (2, 11))
    mask = torch.ones_like(ids)
    mask[1, 11 - padding :] = 0
    inputs = {"input_ids": ids, **({"attention_mask": mask} if padding else {})}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs).logits
        model.set_attn_implementation("sdpa")
        use_cpu_attention(model)
        assert model.config._attn_implementation == CPU_ATTENTION
        found = model(**inputs).logits
        cached = model(ids[:, :6], use_cache=True)
        rest = model(ids[:, 6:], **{CACHE: cached[CACHE]}).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
    if not padding:
        torch.testing.assert_close(rest, expected[:, 6:], rtol=1e-4, atol=1e-5)


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
