"""Attention in blocks against torch's fused one and against transformers' eager one, on windows and masks too."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, MistralConfig, MistralForCausalLM

from replug.models import fused_layers
from replug.models.fused_layers import NAME, blocked_attention, use_cpu_attention


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


def test_a_model_that_asks_for_another_attention_keeps_it():
    model = no_window()
    model.set_attn_implementation("eager")
    use_cpu_attention(model)
    assert model.config._attn_implementation == "eager"
