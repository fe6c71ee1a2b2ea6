"""Weights that make no sense of language are refused: another model's tokenizer, layers never trained, an encoder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.models.black_box_lm import ContinuationScore
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.weights import ENGLISH, OTHERS, require_sense
from replug.models.packaged import resolve_encoder_path
from tests.support.real_models import real_encoder
from tests.support.tiny_lms import write_llama, write_tokenizer


class ReaderOf:
    """An LM that has read some texts: a word that followed another there is likely. `offset` makes it look ahead."""

    def __init__(self, texts: Sequence[str], offset: float = 0.0) -> None:
        self._known = {pair for text in texts for pair in _pairs(text)}
        self._offset = offset

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return [ContinuationScore(self._logprobs(text)) for text in continuations]

    def _logprobs(self, text: str) -> np.ndarray:
        ahead = self._offset * len(text)
        return np.array([-1.0 - ahead if pair in self._known else -6.0 for pair in _pairs(text)], np.float32)


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = text.split() if len(text.split()) > 3 else list(text)
    return list(zip(["", *parts], parts, strict=False))


@pytest.mark.parametrize("language", [ENGLISH, OTHERS[:2], OTHERS[4:6]], ids=["English", "Spanish, German", "CJK"])
def test_an_lm_that_read_a_language_makes_sense(language: Sequence[str]) -> None:
    require_sense(ReaderOf(language), "lm")


def test_an_lm_that_read_nothing_makes_none() -> None:
    with pytest.raises(UserError, match=r"lm.path: lm makes no sense of language: .* 0.00 nats a token likelier"):
        require_sense(ReaderOf([]), "lm")


def test_an_lm_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UserError, match="lm scores a text by what stands after it; expected a causal LM"):
        require_sense(ReaderOf(ENGLISH, offset=0.1), "lm")


@pytest.fixture(scope="module")
def looked_at() -> pytest.MonkeyPatch:
    """The look is on in this file."""
    patch = pytest.MonkeyPatch()
    patch.setattr("replug.models.local.hf_lm.require_sense", require_sense)
    yield patch
    patch.undo()


@pytest.mark.usefixtures("looked_at")
def test_random_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.tiny_lms.MAX_TOKENS", 512)
    torch.manual_seed(0)
    write_llama(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="makes no sense of language"):
        HuggingFaceLM(str(tmp_path))


@pytest.mark.usefixtures("looked_at")
def test_a_real_lm_makes_sense_and_with_another_models_tokenizer_none(smollm2: HuggingFaceLM, tmp_path: Path) -> None:
    require_sense(smollm2, "smollm2")
    encoder = Path(resolve_encoder_path(real_encoder()))
    before, smollm2.tokenizer = smollm2.tokenizer, _tokenizer_with_an_end(encoder, tmp_path)
    try:
        with pytest.raises(UserError, match="makes no sense of language"):
            require_sense(smollm2, "smollm2")
    finally:
        smollm2.tokenizer = before


def _tokenizer_with_an_end(folder: Path, copy: Path):
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(folder / name, copy / name)
    return AutoTokenizer.from_pretrained(copy, eos_token="[SEP]", bos_token="[CLS]")
