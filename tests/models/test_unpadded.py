"""Passes without padding, on a CPU by torch's attention: transformers tells rows apart by their positions in both."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import masking_utils

from replug.config.errors import UserError
from replug.models.batching import even_batches
from replug.models.local import weights
from replug.models.local.hf_lm import HuggingFaceLM, require_rows_apart
from tests.support.tiny_lms import CONTINUATIONS, PREFIXES, load, write_gpt2, write_llama


@pytest.mark.parametrize("write", [write_gpt2, write_llama])
def test_unpadded_passes_give_the_numbers_of_padded_ones(write: Callable[[Path], None], tmp_path: Path) -> None:
    load(write, tmp_path)
    padded, unpadded = (HuggingFaceLM(str(tmp_path), tokens_per_batch=100) for _ in range(2))
    unpadded._is_unpadded = True
    prefixes, continuations = [*PREFIXES, "x", "x", "x"], [*CONTINUATIONS, "a", "b", "c"]  # and choices after one
    for some in ((prefixes, continuations), (["the cat"], [" sat"]), ([""], ["a"])):
        for one, other in zip(padded.score(*some), unpadded.score(*some), strict=True):
            np.testing.assert_allclose(other.token_logprobs, one.token_logprobs, rtol=1e-5, atol=1e-5)
    assert unpadded.counts.padded_tokens == unpadded.counts.tokens == padded.counts.tokens
    assert padded.counts.padded_tokens > padded.counts.tokens


def test_an_architecture_that_does_not_keep_rows_apart_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_llama, tmp_path).model
    require_rows_apart(model)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(UserError, match="LlamaForCausalLM does not keep unpadded rows apart"):
        require_rows_apart(model)


def test_unpadded_batches_are_even_in_their_tokens() -> None:
    assert even_batches([6, 5, 4, 3, 2, 1], 12, padded=False) == [[0, 1], [2, 3, 4, 5]]
    assert even_batches([6, 5, 4], 100, padded=False) == [[0, 1, 2]]
    assert even_batches([30, 2], 10, padded=False) == [[0], [1]]
    assert even_batches([], 10, padded=False) == []


def test_flash_attention_is_refused_by_name_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(write_gpt2, tmp_path)
    with pytest.raises(UserError, match=r"^lm.attention is flash_attention_2, .* \(found bfloat16\): pip install"):
        HuggingFaceLM(str(tmp_path), torch.bfloat16, attention="flash_attention_2")
    monkeypatch.setattr(weights, "is_flash_attn_2_available", lambda: True)
    with pytest.raises(UserError, match=r"lm.dtype=bfloat16 or float16 \(found float32\)"):
        weights.require_flash_attention(torch.float32)
    weights.require_flash_attention(torch.float16)
