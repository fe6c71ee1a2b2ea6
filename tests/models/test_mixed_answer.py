"""A server's answers to several prompts: those of the same weights here, token by token or as whole answers."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from replug.config.errors import UserError
from replug.models.black_box_lm import Mixture
from replug.models.generation import GenerationOptions
from replug.models.http.completions_api import ServerText
from replug.models.http.http_lm import HttpLM
from replug.models.http.mixed_answer import TokenNames, TopTokens, contenders
from replug.models.http.request_budget import RequestBudget
from replug.models.local.hf_lm import HuggingFaceLM
from tests.support.fault_server import FaultServer, server_spec
from tests.support.lm_answers import mixed, texts_of
from tests.support.tiny_lms import MAX_TOKENS, load_that_speaks
from tests.support.tokenizers import llama_with


class HFServer(FaultServer):
    """A FaultServer whose answers are those of `model`; `num_tops` limits what it shows (None: what is asked for)."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_tops: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._model, self._tokenizer, self._num_tops = model, tokenizer, num_tops

    def _split(self, prompt: str | list[int]) -> list[Any]:
        return self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _choice(self, index: int, words: list[Any], payload: dict, sample: int) -> dict:
        new = self._continue(words, payload["max_tokens"])
        echo = bool(payload.get("echo"))
        shown = [*words, *new] if echo else new
        by_id = payload.get("return_tokens_as_token_ids", False)
        logprobs = self._logprobs([*words, *new])  # [T, V]
        first = 0 if echo else len(words)
        rows = [None if place == 0 else logprobs[place - 1] for place in range(first, first + len(shown))]
        choice = {
            "index": index,
            "text": self._tokenizer.decode(shown, skip_special_tokens=True),
            "finish_reason": "length" if len(new) == payload["max_tokens"] else "stop",
            "logprobs": {
                "tokens": [self._name(token, by_id) for token in shown],
                "token_logprobs": [None if row is None else float(row[t]) for row, t in zip(rows, shown, strict=True)],
                "top_logprobs": [
                    self._tops(row, t, payload.get("logprobs", 1), by_id) for row, t in zip(rows, shown, strict=True)
                ],
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

    def _name(self, token: int, by_id: bool) -> str:
        return f"token_id:{token}" if by_id else str(self._tokenizer.decode([token]))

    def _tops(self, row: torch.Tensor | None, chosen: int, number: int, by_id: bool) -> dict[str, float] | None:
        if row is None:
            return None
        top = row.topk(min(number, self._num_tops or number)).indices.tolist()
        return {self._name(token, by_id): float(row[token]) for token in dict.fromkeys([*top, chosen])}


PROMPTS = ["the cat sat on the mat", "a much longer prefix of the cat", "x", "the beginning of a text: the cat"]
WEIGHTS = [0.4, 0.3, 0.2, 0.1]
MIXTURES = [
    Mixture(PROMPTS, WEIGHTS),
    Mixture(PROMPTS, WEIGHTS, 0.05),
    Mixture(PROMPTS, WEIGHTS, 0.05, prune=0.15),
    Mixture([f"{prompt} is on the mat" for prompt in PROMPTS], WEIGHTS, 0.05, read=3),
]


def top(others: float, **probabilities: float) -> TopTokens:
    """Tokens are called t0, t1, …."""
    logprobs = {int(name[1:]): math.log(value) for name, value in probabilities.items()}
    return TopTokens(logprobs, math.log(others), max(logprobs, key=lambda token: logprobs[token]))


def test_a_token_that_all_others_stay_below_is_the_likeliest() -> None:
    parts = [top(0.1, t1=0.7, t2=0.2), top(0.1, t1=0.6, t3=0.3)]
    assert contenders(parts, [0.5, 0.5]) == [1]


def test_tokens_that_some_part_does_not_show_are_asked_for_where_they_may_win() -> None:
    parts = [top(0.2, t1=0.5, t2=0.3), top(0.1, t2=0.6, t3=0.2)]  # t1: 0.25 to 0.3, t2: 0.45, t3: 0.1 to 0.2
    assert contenders(parts, [0.5, 0.5]) == [2]
    parts = [top(0.2, t1=0.5, t2=0.3), top(0.3, t3=0.4, t4=0.3)]  # t1: 0.25 to 0.4, t3: 0.2 to 0.3
    some = contenders(parts, [0.5, 0.5])
    assert some == [1, 3, 2, 4] or set(some) == {1, 2, 3, 4}
    parts = [top(0.2, t1=0.5, t2=0.3, t3=0.2, t4=0.01), top(0.3, t1=1e-4, t2=1e-4, t3=0.4, t4=0.3)]
    assert contenders(parts, [0.5, 0.5])[0] == 3


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of seven tokens, of which two are shown alike and one is a part of a character."""
    texts = [" a", " b", "b", "▁b", "</s>", "<end>", "\ufffd"]
    words = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token="\ufffd"))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<end>")


def shown(text: str, *tokens: str, tops: list[dict[str, float]], is_ended: bool = False) -> ServerText:
    return ServerText(text, np.zeros(len(tokens)), tokens, tuple(tops), is_ended)


def test_only_tokens_that_a_text_names_for_sure_are_used():
    names = TokenNames(words_tokenizer())
    tops = [{" a": -0.1, "b": -3.0}, {"b": -0.2, " a": -2.0}]
    assert [step.own for step in names.steps(shown(" ab", " a", "b", tops=tops), 2)] == [0, 2]
    assert [step.own for step in names.steps(shown(" a b", " a", " b", tops=tops), 2)] == [0], "1 or 3"
    assert names.steps(shown(" other", " a", "b", tops=tops), 2) == [], "not the tokens of the text"
    assert names.steps(shown(" ab", " a", "b", tops=tops), 3) == [], "fewer are shown than were asked for"
    assert [
        step.own
        for step in names.steps(
            shown(
                " a b",
                "token_id:0",
                "token_id:1",
                tops=[{"token_id:0": -0.1, "token_id:3": -2.0}, {"token_id:1": -0.1, "token_id:0": -2.0}],
            ),
            2,
        )
    ] == [0, 1]


def test_what_is_shown_and_not_known_may_be_any_token():
    names = TokenNames(words_tokenizer())
    [step] = names.steps(shown(" a", " a", tops=[{" a": -0.5, " b": -1.0, "b": -4.0}]), 3)
    assert dict(step.logprobs) == {0: -0.5, 2: -4.0} and step.most_of_others == -1.0


def test_an_end_that_only_the_server_knows_is_learnt():
    names = TokenNames(words_tokenizer())
    assert names.ends == {4}
    names.steps(shown(" a", " a", "<end>", tops=[{" a": -0.1}, {"<end>": -0.1}], is_ended=True), 1)
    assert names.ends == {4, 5}


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


def opened(server: HFServer, **changes: object) -> HttpLM:
    return HttpLM(server_spec(server.url, timeout_seconds=60, **changes), RequestBudget(None))


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_a_server_answers_as_the_same_weights_do_here(
    local: HuggingFaceLM, folder: str, server: HFServer, api: str
) -> None:
    lm = opened(server, tokenizer=folder, api=api)
    settled = []
    for mixture, options in itertools.product(MIXTURES, (GenerationOptions(5), GenerationOptions(4, stop=" "))):
        [here], [there] = local.generate([mixture], options), lm.generate([mixture], options)
        if there.answer_tokens is not None:  # the likeliest tokens of a random LM do not always settle it
            continue
        settled.append(mixture)
        assert (there.text, there.num_prompts, there.prompt_tokens) == (here.text, 4, here.prompt_tokens)
        np.testing.assert_allclose(there.token_logprobs, here.token_logprobs, atol=1e-5)
        np.testing.assert_allclose(there.weights, here.weights, atol=1e-5)
    lm.close()
    assert all(mixture in settled for mixture in MIXTURES)


def test_a_pruned_prompt_is_asked_and_scored_no_further(local: HuggingFaceLM, folder: str, server: HFServer) -> None:
    lm = opened(server, tokenizer=folder)
    [answer] = lm.generate(MIXTURES[2:3], GenerationOptions(5))
    lm.close()
    left_out = [prompt for prompt, weight in zip(PROMPTS, answer.weights, strict=True) if not weight]
    assert left_out and answer.answer_tokens is None and answer.num_tokens == 5
    asked = [ids for payload in server.payloads for ids in payload["prompt"]]
    for own in (local.tokenizer(prompt)["input_ids"] for prompt in left_out):  # with the first token, which left it out
        assert max(len(ids) - len(own) for ids in asked if ids[: len(own)] == own) <= 1


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_a_server_with_sentencepiece_scores_and_answers_as_the_same_weights_do_here(tmp_path: Path, api: str) -> None:
    here = llama_with("Llama 2", tmp_path)
    prefixes, continuations = ["The river is the Rhi", "Answer:", "a line\n"], ["ne and", " A", "Москва"]
    options = GenerationOptions(4)
    with HFServer(here.model, here.tokenizer, max_model_len=MAX_TOKENS) as server:
        there = opened(server, tokenizer=str(tmp_path), api=api)
        ours, theirs = (lm.score(prefixes, continuations) for lm in (here, there))
        answers = [mixed(lm, ["The river is", "Paris is"], [0.9, 0.1], options) for lm in (here, there)]
        there.close()
    for found, expected in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-4)
    assert answers[1].answer_tokens is not None or answers[0].text == answers[1].text


def test_without_the_tokenizer_every_answer_is_scored_after_every_prompt(
    local: HuggingFaceLM, server: HFServer
) -> None:
    options = GenerationOptions(4)
    with_text = opened(server)
    found, moved = (with_text.generate([mixture], options)[0] for mixture in MIXTURES[:2])
    answers = [texts_of(with_text, [prompt], 4)[0] for prompt in PROMPTS]
    with_text.close()
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


def test_without_the_tokenizer_no_tokens_of_prompts_are_read(server: HFServer) -> None:
    with_text = opened(server)
    with pytest.raises(UserError, match=r"ensemble\.read counts tokens .* lm\.tokenizer"):
        with_text.generate(MIXTURES[3:], GenerationOptions(4))
    with pytest.raises(UserError, match=r"ensemble\.read counts tokens"):
        with_text.score(["the cat"], [" sat"], read=3)
    with_text.close()


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_a_server_scores_the_tokens_that_are_read_as_the_same_weights_do_here(
    local: HuggingFaceLM, folder: str, server: HFServer, api: str
) -> None:
    lm = opened(server, tokenizer=folder, api=api)
    pairs = [*PROMPTS, "y"], [" sat down"] * 5
    plain = local.score(*pairs)
    for one, other, alone in zip(lm.score(*pairs, read=4), local.score(*pairs, read=4), plain, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)
        np.testing.assert_allclose(one.read_logprobs, other.read_logprobs, atol=1e-4)
        assert one.read_ids.tolist() == other.read_ids.tolist()
        np.testing.assert_allclose(other.token_logprobs, alone.token_logprobs, atol=1e-4)
    ids = local.tokenizer(PROMPTS[0])["input_ids"]
    assert lm.score(*pairs, read=4)[0].read_ids.tolist() == ids[-4:]
    lm.close()


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


def test_a_server_that_shows_too_few_tokens_gives_whole_answers(local: HuggingFaceLM, folder: str) -> None:
    with HFServer(local.model, local.tokenizer, num_tops=2, max_model_len=MAX_TOKENS) as server:
        lm = opened(server, tokenizer=folder)
        found = mixed(lm, PROMPTS, WEIGHTS, GenerationOptions(3))
        assert len(found.token_logprobs) == 1 and found.answer_tokens
        assert found.text in texts_of(lm, PROMPTS, 3)
        lm.close()
