"""Fused layers against what they stand for: attention in blocks on windows and masks too, and the tanh GELU."""

from pathlib import Path

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from replug.models import fused_layers
from replug.models.fused_layers import NAME, WRITTEN_OUT, blocked_attention, use_cpu_attention, use_fused_gelu
from replug.models.local.hf_lm import HuggingFaceLM
from tests.support.tiny_lms import CONTINUATIONS, PREFIXES, random_lms_need_make_no_sense, write_gpt2, write_tokenizer

__all__ = ["random_lms_need_make_no_sense"]


@pytest.mark.parametrize(("positions", "block_bytes"), [(64, 4 * 2**20), (3, 1), (1, 2000)])
@pytest.mark.parametrize(
    ("heads", "groups", "length", "keys"), [(4, 4, 7, 7), (6, 2, 9, 9), (6, 2, 5, 12), (4, 1, 2, 9)]
)
def test_it_equals_the_fused_attention(monkeypatch, heads, groups, length, keys, positions, block_bytes):
    monkeypatch.setattr(fused_layers, "POSITIONS_PER_BLOCK", positions)
    monkeypatch.setattr(fused_layers, "BLOCK_BYTES", block_bytes)
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
    """As much of an attention layer as such a function looks at."""

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
        assert model.config._attn_implementation == NAME
        found = model(**inputs).logits
        cached = model(ids[:, :6], use_cache=True)
        rest = model(ids[:, 6:], past_key_values=cached.past_key_values).logits
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
    assert use_fused_gelu(model) == 1
    fused = model(points)
    [fused_slope] = torch.autograd.grad(fused.sum(), points)
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(fused_slope, slope, atol=2e-6, rtol=1e-6)


def test_a_gpt2_scores_alike_with_and_without_and_the_kernel_is_what_runs(tmp_path: Path, monkeypatch) -> None:
    torch.manual_seed(0)
    write_gpt2(tmp_path)
    write_tokenizer(tmp_path)
    fused = HuggingFaceLM(str(tmp_path))
    for name in ("use_cpu_attention", "use_fused_gelu"):
        monkeypatch.setattr(f"replug.models.local.hf_lm.{name}", lambda model: None)
    plain = HuggingFaceLM(str(tmp_path))
    kinds = [{type(block.mlp.act) for block in lm.model.transformer.h} for lm in (plain, fused)]
    assert kinds == [{WRITTEN_OUT[0]}, {torch.nn.GELU}]
    assert plain.model.config._attn_implementation == "sdpa"
    for a, b in zip(plain.score(PREFIXES, CONTINUATIONS), fused.score(PREFIXES, CONTINUATIONS), strict=True):
        torch.testing.assert_close(*map(torch.from_numpy, (a.token_logprobs, b.token_logprobs)), atol=1e-5, rtol=1e-6)
