"""Float32 logits of half-precision LMs: against float64, under autocast, and with what models do to their logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from replug.models.generation import GenerationOptions
from replug.models.local import mixtures, output_layer
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.output_layer import Float32Head, target_logprobs
from tests.support.lm_answers import mixed
from tests.support.real_models import real_lm
from tests.support.tiny_lms import CONTINUATIONS, MAX_TOKENS, PREFIXES, VOCABULARY, write_llama, write_tokenizer

HALF = [torch.bfloat16, torch.float16]


def head_and_rows(dtype: torch.dtype, bias: bool = False, num_rows: int = 40) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(48, 3000, bias=bias).to(dtype).requires_grad_(False)
    return head, (torch.randn(num_rows, 48) * 30).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_logits_are_exact_to_float32(dtype: torch.dtype, bias: bool) -> None:
    linear, rows = head_and_rows(dtype, bias)
    exact = rows.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    logits = Float32Head(linear)(rows.view(5, 8, 48))
    assert (logits.dtype, logits.shape) == (torch.float32, (5, 8, 3000))
    torch.testing.assert_close(logits.view(40, 3000).double(), exact, atol=1e-4, rtol=1e-5)
    assert (linear(rows).double() - exact).abs().max() > 1e-2  # else the test shows nothing


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_rows", [1, 40, 1100])
def test_log_probs_in_pieces_are_those_of_all_logits_at_once(dtype: torch.dtype, num_rows: int) -> None:
    linear, rows = head_and_rows(dtype, num_rows=num_rows)
    target = torch.randint(3000, (num_rows,))
    target[0] = 2999
    exact = (rows.double() @ linear.weight.double().T).log_softmax(-1).gather(1, target[:, None])[:, 0]
    found = target_logprobs(rows, target, Float32Head(linear))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=1e-5)
    assert (found <= 0).all()


def test_autocast_does_not_round_them() -> None:
    linear, rows = head_and_rows(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert (rows.float() @ linear.weight.float().T).dtype == torch.bfloat16  # what autocast does
        logits = Float32Head(linear)(rows)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, Float32Head(linear)(rows), atol=0, rtol=0)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


def capping() -> PreTrainedModel:
    return Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=2, final_logit_softcapping=5.0, sliding_window=64)
    )


@pytest.mark.parametrize("dtype", HALF)
def test_what_a_model_does_to_its_logits_is_done_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    capping().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    lm = HuggingFaceLM(str(tmp_path), dtype)
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
    lm = HuggingFaceLM(str(tmp_path), dtype)
    assert isinstance(lm._head, Float32Head)
    whole = HuggingFaceLM(str(tmp_path), dtype)
    whole._head, whole._shares = None, False
    for a, b in zip(lm.score(PREFIXES, CONTINUATIONS), whole.score(PREFIXES, CONTINUATIONS), strict=True):
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)
    seen, mix = [], mixtures.mix_next_token
    monkeypatch.setattr(mixtures, "mix_next_token", lambda logits, w: seen.append(logits.dtype) or mix(logits, w))
    for way in (lm, whole):
        mixed(way, ["the cat sat", "x"], [0.5, 0.5], GenerationOptions(3))
    assert set(seen) == {torch.float32}


def test_the_noise_of_rounded_logits_is_gone_from_a_real_lm() -> None:
    lm = HuggingFaceLM(real_lm(), torch.bfloat16)
    ids = lm.tokenizer(Path(output_layer.__file__).read_text())["input_ids"][:150]
    with torch.inference_mode():
        hidden = lm._body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
    target = torch.tensor(ids[1:])
    exact = (hidden.double() @ lm._head.weight.double().T).log_softmax(-1).gather(1, target[:, None])[:, 0]
    rounded = (hidden @ lm._head.weight.T).double().log_softmax(-1).gather(1, target[:, None])[:, 0]
    noise = (target_logprobs(hidden, target, lm._head).double() - exact).std()
    assert noise < 1e-4 < 1e-2 < (rounded - exact).std()
