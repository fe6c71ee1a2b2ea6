"""The tanh GELU as one kernel against what transformers writes out: activations, their gradients, and whole models."""

from pathlib import Path

import pytest
import torch
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel, T5Config, T5EncoderModel
from transformers.activations import ACT2FN

from replug.models.fused_layers import WRITTEN_OUT, use_fused_gelu
from replug.models.local.hf_lm import HuggingFaceLM
from tests.support.tiny_lms import CONTINUATIONS, PREFIXES, random_lms_need_make_no_sense, write_gpt2, write_tokenizer

__all__ = ["random_lms_need_make_no_sense"]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}


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


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "quick_gelu", "gelu_10", "tanh"])
def test_other_activations_stay(name: str) -> None:
    model = torch.nn.Sequential(ACT2FN[name])
    assert use_fused_gelu(model) == 0
    assert model[0] is not None and type(model[0]) is type(ACT2FN[name])


def albert() -> AlbertModel:
    return AlbertModel(AlbertConfig(**SMALL, embedding_size=16))


def bert_with_tanh() -> BertModel:
    return BertModel(BertConfig(**SMALL, hidden_act="gelu_new"))


def gated_t5() -> T5EncoderModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


@pytest.mark.parametrize("make", [albert, bert_with_tanh, gated_t5])
def test_encoders_give_the_states_that_they_gave(make) -> None:
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(99, (3, 17))
    with torch.inference_mode():
        plain = model(input_ids=ids).last_hidden_state
        assert use_fused_gelu(model) > 0
        torch.testing.assert_close(model(input_ids=ids).last_hidden_state, plain, atol=1e-6, rtol=1e-6)


def test_a_gpt2_scores_alike_with_and_without_and_the_kernel_is_what_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_gpt2(tmp_path)
    write_tokenizer(tmp_path)
    plain, fused = (HuggingFaceLM(str(tmp_path), fused=fused) for fused in (False, True))
    kinds = [{type(block.mlp.act) for block in lm.model.transformer.h} for lm in (plain, fused)]
    assert kinds == [{WRITTEN_OUT[0]}, {torch.nn.GELU}]
    assert plain.model.config._attn_implementation == "sdpa"
    for a, b in zip(plain.score(PREFIXES, CONTINUATIONS), fused.score(PREFIXES, CONTINUATIONS), strict=True):
        torch.testing.assert_close(*map(torch.from_numpy, (a.token_logprobs, b.token_logprobs)), atol=1e-5, rtol=1e-6)
