"""Passes without padding against padded ones: the same numbers, less computed; and who cannot have them."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel, masking_utils

from replug.config.errors import UserError
from replug.models.batching import even_batches
from replug.models.local import packed_attention
from replug.models.local.computing import Computing
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.hf_source import HuggingFaceSource
from replug.models.local.packed_attention import packed_states, why_not_packed
from tests.support.fake_devices import fake_gpus, spread
from tests.support.tiny_lms import (
    CONTINUATIONS,
    DEMONSTRATIONS,
    MAX_TOKENS,
    PREFIXES,
    VOCABULARY,
    load,
    random_lms_need_make_no_sense,
    write_gpt2,
    write_llama,
)

__all__ = ["random_lms_need_make_no_sense"]

SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": MAX_TOKENS, "bos_token_id": 0, "eos_token_id": 1}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}


def write_neox(folder: Path) -> None:
    config = transformers.GPTNeoXConfig(**SIZES, **LAYERS, intermediate_size=64)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)


def write_opt(folder: Path) -> None:
    config = transformers.OPTConfig(**SIZES, **LAYERS, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3)
    transformers.OPTForCausalLM(config).save_pretrained(folder)


def windowed() -> PreTrainedModel:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, **LAYERS, intermediate_size=64, num_key_value_heads=2, sliding_window=16)
    )


def capped() -> PreTrainedModel:
    config = transformers.Gemma2Config(**SIZES, **LAYERS, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    return transformers.Gemma2ForCausalLM(config)


def by_distance() -> PreTrainedModel:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


@pytest.fixture(scope="module", params=[write_gpt2, write_llama, write_neox, write_opt])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[HuggingFaceLM]:
    """The same weights, padded and packed."""
    folder = tmp_path_factory.mktemp("lm")
    load(request.param, folder)
    return [
        HuggingFaceLM(str(folder), tokens_per_batch=100, computing=Computing(packed=packed)) for packed in (False, True)
    ]


def test_packed_passes_give_the_numbers_of_padded_ones(both: list[HuggingFaceLM]) -> None:
    padded, packed = both
    prefixes, continuations = [*PREFIXES, "x", "x", "x"], [*CONTINUATIONS, "a", "b", "c"]  # and choices after one
    expected, found = (lm.score(prefixes, continuations) for lm in both)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other.token_logprobs, one.token_logprobs, rtol=1e-6, atol=2e-6)
    assert packed.counts.padded_tokens == packed.counts.tokens == padded.counts.tokens
    assert padded.counts.padded_tokens > padded.counts.tokens


def test_one_row_and_one_token_are_packed_too(both: list[HuggingFaceLM]) -> None:
    for prefixes, continuations in ((["the cat"], [" sat"]), ([""], ["a"]), (["", ""], ["a", "b"])):
        expected, found = (lm.score(prefixes, continuations) for lm in both)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other.token_logprobs, one.token_logprobs, rtol=1e-6, atol=2e-6)


def test_other_passes_are_as_they_were(both: list[HuggingFaceLM]) -> None:
    """After a shared prefix, in trees, and where text is generated."""
    prefixes = [f"{DEMONSTRATIONS}{text}" for text in ("a mat", "x", "the cat slept, and")]
    for opening in (None, DEMONSTRATIONS):
        expected, found = (lm.score(prefixes, [" sat", " on", "!"], opening=opening) for lm in both)
        for one, other in zip(expected, found, strict=True):
            assert one.token_logprobs.tobytes() == other.token_logprobs.tobytes()
    texts = [lm.generate(["the cat sat", "x"], 4) for lm in both]
    assert texts[0] == texts[1]


def test_a_packed_pass_asks_the_host_for_no_position(both: list[HuggingFaceLM], monkeypatch) -> None:
    _, packed = both
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: pytest.fail("it was asked"))
    packed.score(PREFIXES, CONTINUATIONS)


def test_packed_batches_are_even_in_their_tokens() -> None:
    assert even_batches([6, 5, 4, 3, 2, 1], 12, padded=False) == [[0, 1], [2, 3, 4, 5]]
    assert even_batches([6, 5, 4], 100, padded=False) == [[0, 1, 2]]
    assert even_batches([30, 2], 10, padded=False) == [[0], [1]]
    assert even_batches([], 10, padded=False) == []


# Who cannot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (windowed, "MistralForCausalLM has attention with a window, a bias or a cap"),
        (capped, "Gemma2ForCausalLM has attention with a window, a bias or a cap"),
        (by_distance, "BloomForCausalLM is not told positions"),
    ],
)
def test_attention_that_is_more_than_causal_is_not_packed(make: Callable[[], PreTrainedModel], reason: str) -> None:
    model = make().eval()
    before = model.config._attn_implementation
    assert why_not_packed(model) == reason
    assert model.config._attn_implementation == before


def test_a_model_that_computes_other_numbers_is_not_packed(both: list[HuggingFaceLM], monkeypatch) -> None:
    blocks = packed_attention.causal_blocks
    monkeypatch.setattr(packed_attention, "causal_blocks", lambda q, k, v, scale: 1.1 * blocks(q, k, v, scale))
    assert "computes other numbers" in why_not_packed(both[1].model)


def test_lm_packed_is_refused_by_name_and_left_out_by_default(tmp_path: Path, monkeypatch) -> None:
    plain = load(write_llama, tmp_path)
    assert not plain._packs  # no gain on a CPU
    assert HuggingFaceSource(str(tmp_path), computing=Computing(packed=True)).load()._packs
    monkeypatch.setattr(packed_attention, "why_not_packed", lambda model: "it has a window")
    assert not packed_attention.packs_rows(plain.model, None, True, None, "lm")
    with pytest.raises(UserError, match=r"^lm.packed is true, but .* cannot be packed: it has a window; expected"):
        HuggingFaceLM(str(tmp_path), computing=Computing(packed=True))
    assert not packed_attention.packs_rows(plain.model, False, True, None, "lm")


def test_lm_packed_is_refused_with_compiled_layers(tmp_path: Path) -> None:
    load(write_llama, tmp_path)
    with pytest.raises(UserError, match=r"^lm.packed is true, but .*: its layers are compiled or spread over GPUs"):
        HuggingFaceLM(str(tmp_path), computing=Computing(compile=True, packed=True))


# On a GPU --------------------------------------------------------------------------------------------------------


def reference(query, key, value, starts, keys_start, longest, longest_key, *, scale, window_size, enable_gqa):
    """What `varlen_attn` says of itself: query [T, H, D], key and value [T, G, D]."""
    assert window_size == (-1, 0) and starts.dtype == torch.int32 and keys_start is starts
    assert longest == longest_key == int(starts.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    parts = []
    for start, end in pairwise(starts.tolist()):
        q, k, v = (whole[start:end].transpose(0, 1)[None] for whole in (query, key, value))
        seen = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(seen[0].transpose(0, 1))
    return torch.cat(parts)


def test_what_the_kernel_is_given_makes_the_same_numbers(both: list[HuggingFaceLM], monkeypatch) -> None:
    padded, packed = both
    monkeypatch.setattr(packed_attention, "varlen_attn", reference)
    monkeypatch.setattr(packed_attention, "on_gpu", lambda tensor: True)
    expected, found = padded.score(PREFIXES, CONTINUATIONS), packed.score(PREFIXES, CONTINUATIONS)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other.token_logprobs, one.token_logprobs, rtol=1e-5, atol=1e-5)


def test_the_kernel_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own check of shapes, on a device that computes nothing."""
    with fake_gpus(monkeypatch):
        config = transformers.LlamaConfig(**SIZES, **LAYERS, intermediate_size=64, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(config)
        spread(model, {"model": "cuda:0", "lm_head": "cuda:0"}, torch.bfloat16)
        states = packed_states(model.model, [[1, 2, 3], [4], [5, 6]])
        assert (states.shape, states.dtype, states.device.type) == ((6, 32), torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("dtype", "capability", "has_flash", "reason"),
    [
        (torch.float32, (9, 0), True, "half precision only"),
        (torch.float16, (7, 0), True, "older than the kernel's"),
        (torch.bfloat16, (9, 0), False, "no flash attention"),
        (torch.bfloat16, (8, 0), True, None),
    ],
)
def test_a_gpu_without_the_kernel_is_named(dtype, capability, has_flash, reason, monkeypatch) -> None:
    model = windowed().to(dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has_flash)
    found = packed_attention._why_no_kernel(model)
    assert found is None if reason is None else reason in found
