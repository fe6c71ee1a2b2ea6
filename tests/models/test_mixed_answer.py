"""A server's answers to several prompts, scored whole, and its scores: those of the same weights here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.models.black_box_lm import Mixture
from replug.models.ensemble import Weighting
from replug.models.generation import GenerationOptions
from replug.models.local.hf_lm import HuggingFaceLM
from tests.models.conftest import Opened
from tests.support.fault_server import FaultServer
from tests.support.lm_answers import texts_of
from tests.support.tiny_lms import MAX_TOKENS, load_that_speaks
from tests.support.tokenizers import llama_with


class HFServer(FaultServer):
    """A FaultServer whose answers are those of `model`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        super().__init__(**options)
        self._model, self._tokenizer = model, tokenizer

    def _split(self, prompt: str | list[int]) -> list[Any]:
        return self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _choice(self, index: int, words: list[Any], payload: dict, sample: int) -> dict:
        new = self._continue(words, payload["max_tokens"])
        echo = bool(payload.get("echo"))
        shown = [*words, *new] if echo else new
        logprobs = self._logprobs([*words, *new])  # [T, V]
        first = 0 if echo else len(words)
        rows = [None if place == 0 else logprobs[place - 1] for place in range(first, first + len(shown))]
        choice = {
            "index": index,
            "text": self._tokenizer.decode(shown, skip_special_tokens=True),
            "finish_reason": "length" if len(new) == payload["max_tokens"] else "stop",
            "logprobs": {
                "tokens": [self._tokenizer.decode([token]) for token in shown],
                "token_logprobs": [None if row is None else float(row[t]) for row, t in zip(rows, shown, strict=True)],
            },
        }
        if "prompt_logprobs" in payload:
            entries = [{str(t): {"logprob": float(row[t])}} for row, t in zip(logprobs, words[1:], strict=False)]
            return choice | {"prompt_logprobs": [None, *entries]}
        return choice

    def _continue(self, ids: list[int], number: int) -> list[int]:
        new: list[int] = []
        while len(new) < number and self._tokenizer.eos_token_id not in new:
            new.append(int(self._logprobs([*ids, *new])[-1].argmax()))
        return new

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


PROMPTS = ["the cat sat on the mat", "a much longer prefix of the cat", "x", "the beginning of a text: the cat"]
WEIGHTS = [0.4, 0.3, 0.2, 0.1]
MIXTURES = [
    Mixture(PROMPTS, WEIGHTS),
    Mixture(PROMPTS, WEIGHTS, Weighting(0.05)),
    Mixture(PROMPTS, WEIGHTS, Weighting(0.05, prune=0.15)),
    Mixture([f"{prompt} is on the mat" for prompt in PROMPTS], WEIGHTS, Weighting(0.05, read=3)),
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    return load_that_speaks(tmp_path_factory.mktemp("lm"), sureness=2)  # about as sure as a trained one


@pytest.fixture(scope="module")
def folder(local: HuggingFaceLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    local.tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def server(local: HuggingFaceLM) -> Iterator[HFServer]:
    with HFServer(local.model, local.tokenizer, max_model_len=MAX_TOKENS) as server:
        yield server


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_a_server_with_sentencepiece_scores_as_the_same_weights_do_here(
    tmp_path: Path, opened: Opened, api: str
) -> None:
    here = llama_with("Llama 2", tmp_path)
    prefixes, continuations = ["The river is the Rhi", "Answer:", "a line\n"], ["ne and", " A", "Москва"]
    with HFServer(here.model, here.tokenizer, max_model_len=MAX_TOKENS) as server:
        there = opened(server, timeout_seconds=60, tokenizer=str(tmp_path), api=api)
        ours, theirs = (lm.score(prefixes, continuations) for lm in (here, there))
    for found, expected in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-4)


def test_every_answer_is_scored_after_every_prompt(
    local: HuggingFaceLM, folder: str, server: HFServer, opened: Opened
) -> None:
    options = GenerationOptions(4)
    lm = opened(server, timeout_seconds=60, tokenizer=folder)
    found, moved = (lm.generate([mixture], options)[0] for mixture in MIXTURES[:2])
    answers = [texts_of(lm, [prompt], 4)[0] for prompt in PROMPTS]
    masses = {}
    for answer in dict.fromkeys(answers):
        scores = local_scores(local, PROMPTS, answer)
        masses[answer] = float(np.log(WEIGHTS @ np.exp(scores)).sum())
    best = max(masses, key=masses.__getitem__)
    assert found.text == best and found.sum_logprob == pytest.approx(masses[best], abs=1e-3)
    assert found.num_tokens == local_scores(local, PROMPTS, best).shape[1]
    moving = MIXTURES[1].moving()
    logprob = sum(moving.see(token) for token in local_scores(local, PROMPTS, moved.text).T)
    assert moved.sum_logprob == pytest.approx(logprob, abs=1e-3)
    np.testing.assert_allclose(moved.weights, moving.weights, atol=1e-3)
    np.testing.assert_allclose(found.weights, WEIGHTS)


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_a_server_scores_the_tokens_that_are_read_as_the_same_weights_do_here(
    local: HuggingFaceLM, folder: str, server: HFServer, opened: Opened, api: str
) -> None:
    lm = opened(server, timeout_seconds=60, tokenizer=folder, api=api)
    pairs = [*PROMPTS, "y"], [" sat down"] * 5
    plain = local.score(*pairs)
    for one, other, alone in zip(lm.score(*pairs, read=4), local.score(*pairs, read=4), plain, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)
        np.testing.assert_allclose(one.read_logprobs, other.read_logprobs, atol=1e-4)
        assert one.read_ids.tolist() == other.read_ids.tolist()
        np.testing.assert_allclose(other.token_logprobs, alone.token_logprobs, atol=1e-4)
    ids = local.tokenizer(PROMPTS[0])["input_ids"]
    assert lm.score(*pairs, read=4)[0].read_ids.tolist() == ids[-4:]


def local_scores(lm: HuggingFaceLM, prompts: list[str], answer: str) -> np.ndarray:
    """Log-probs [K, T] by plain passes over the texts as a server cuts them."""
    after = lm.tokenizer(answer, add_special_tokens=False)["input_ids"]
    rows = []
    for prompt in prompts:
        before = lm.tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            logits = lm.model(torch.tensor([[*before, *after]])).logits[0].float().log_softmax(-1)
        rows.append([float(logits[len(before) - 1 + place, token]) for place, token in enumerate(after)])
    return np.array(rows)
