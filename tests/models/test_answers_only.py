"""A server that shows the likeliest tokens of its answers and scores no text, as OpenAI's completions."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.models.black_box_lm import UnsettledAnswer
from replug.models.generation import GenerationOptions
from replug.models.http import answers_probe
from replug.models.http.http_lm import HttpLM
from replug.models.http.probe import connect
from replug.models.http.request_budget import RequestBudget
from replug.models.http.top_tokens import TopTokens, least_logprob
from replug.models.local.hf_lm import HuggingFaceLM
from tests.support.fault_server import server_spec
from tests.support.hf_server import HFServer
from tests.support.tiny_lms import load_that_speaks, write_llama, write_tokenizer

PROMPTS = ["the cat sat on the mat", "the cat sat on the mats", "x"]
ALIKE, MIXED = [0.9, 0.06, 0.04], [0.4, 0.3, 0.3]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    return load_that_speaks(tmp_path_factory.mktemp("lm"), sureness=4)


@pytest.fixture(scope="module")
def folder(local: HuggingFaceLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    local.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(local: HuggingFaceLM) -> Iterator[HFServer]:
    with HFServer(local.model, local.tokenizer, mode="no_echo") as server:
        yield server


@pytest.fixture(scope="module")
def lm(server: HFServer, folder: str) -> Iterator[HttpLM]:
    lm = connect(server_spec(server.url, timeout_seconds=60, tokenizer=folder, api="answers"), RequestBudget(None))
    yield lm
    lm.close()


def steps(*logprobs: float) -> list[TopTokens]:
    """An answer of tokens 0, 1, …, with these log-probs, each the likeliest."""
    return [TopTokens({place: value}, value, place) for place, value in enumerate(logprobs)]


def test_it_passes_a_probe_of_its_answers_and_is_known_again(lm: HttpLM, server: HFServer) -> None:
    assert len(lm.fingerprint) > 4
    assert lm.identity.startswith("words#")
    assert not any(payload.get("echo") or "prompt_logprobs" in payload for payload in server.payloads)


def test_an_answer_that_its_likeliest_tokens_settle_is_that_of_the_same_weights(
    lm: HttpLM, local: HuggingFaceLM
) -> None:
    settled = 0
    for prompts in (PROMPTS, PROMPTS[::-1], [PROMPTS[0], "a much longer prefix", "the beginning"]):
        options = GenerationOptions(2)
        here = local.generate_ensemble(prompts, ALIKE, options)
        try:
            there = lm.generate_ensemble(prompts, ALIKE, options)
        except UnsettledAnswer:
            continue
        settled += 1
        assert there.text == here.text
        assert (there.token_logprobs <= here.token_logprobs + 1e-3).all()  # the least that they can be
        np.testing.assert_allclose(there.token_logprobs, here.token_logprobs, atol=0.3)
    assert settled


def test_an_answer_that_they_leave_open_is_refused_by_its_token(lm: HttpLM) -> None:
    with pytest.raises(UnsettledAnswer, match=r"token \d of the answer is not settled by the 5 likeliest tokens of 4"):
        lm.generate_ensemble(["x", "the cat sat", "a much longer prefix", "日本"], [0.25] * 4, GenerationOptions(8))


def test_the_answer_of_one_prompt_is_always_known(lm: HttpLM, local: HuggingFaceLM) -> None:
    here, there = (one.generate_ensemble(PROMPTS[:1], [1.0], GenerationOptions(4)) for one in (local, lm))
    assert there.text == here.text
    np.testing.assert_allclose(there.token_logprobs, here.token_logprobs, atol=1e-3)


def test_a_text_to_score_is_refused_by_name(lm: HttpLM, server: HFServer) -> None:
    sent = server.requests
    with pytest.raises(UserError, match=r"lm\.api is answers: .* scores no text"):
        lm.score(["a"], [" b"])
    assert server.requests == sent


def test_a_server_that_is_asked_to_score_names_the_way_that_does_without(server: HFServer, folder: str) -> None:
    with pytest.raises(UserError, match=r"lm\.api=answers does with answers alone"):
        connect(server_spec(server.url, timeout_seconds=60, tokenizer=folder), RequestBudget(None))


def test_one_that_shows_fewer_tokens_is_refused(local: HuggingFaceLM, folder: str) -> None:
    with HFServer(local.model, local.tokenizer, num_tops=2, mode="no_echo") as server:
        spec = server_spec(server.url, timeout_seconds=60, tokenizer=folder, api="answers")
        with pytest.raises(UserError, match="does not show the five likeliest tokens"):
            connect(spec, RequestBudget(None))


def test_its_tokenizer_is_wanted() -> None:
    with pytest.raises(UserError, match=r"lm\.tokenizer is missing; lm\.api=answers sends token ids"):
        server_spec("http://127.0.0.1:9/v1", api="answers")


def test_a_token_that_is_not_the_likeliest_is_found() -> None:
    other = TopTokens({0: -3.0, 1: -0.1}, -3.0, 0)
    assert answers_probe.likeliest_shortcoming([steps(-0.1)]) is None
    assert "2.90 nats less likely" in str(answers_probe.likeliest_shortcoming([steps(-0.1), [other]]))


def test_log_probs_that_are_the_same_after_all_texts_are_found() -> None:
    assert answers_probe.alike_shortcoming([steps(-0.1, -0.2), steps(-0.1, -0.3)]) is None
    assert "do not follow the text" in str(answers_probe.alike_shortcoming([steps(-0.1), steps(-0.1)]))


def test_an_answer_that_does_not_go_on_where_it_was_cut_is_found() -> None:
    """As of a chat API, which answers anew."""
    assert answers_probe.continued_shortcoming(steps(-1.0, -0.2, -0.4), steps(-0.25, -0.4)) is None
    assert "goes on otherwise" in str(answers_probe.continued_shortcoming(steps(-1.0, -0.2), steps(-3.0)))
    assert "goes on otherwise" in str(answers_probe.continued_shortcoming(steps(-1.0, -0.2), []))


def test_the_least_log_prob_is_exact_where_all_prompts_show_the_token() -> None:
    parts = [TopTokens({0: math.log(0.5)}, math.log(0.1), 0), TopTokens({0: math.log(0.3), 1: -1.0}, -2.0, 1)]
    assert least_logprob(parts, [0.5, 0.5], 0) == pytest.approx(math.log(0.4))
    assert least_logprob(parts, [0.5, 0.5], 1) == pytest.approx(math.log(0.5 * math.exp(-1)))


def test_one_that_is_no_longer_the_same_is_found(local: HuggingFaceLM, folder: str, tmp_path: Path) -> None:
    with HFServer(local.model, local.tokenizer, mode="no_echo") as server:
        spec = server_spec(server.url, timeout_seconds=60, tokenizer=folder, api="answers", max_attempts=1)
        lm = connect(spec, RequestBudget(None))
        torch.manual_seed(1)
        write_llama(tmp_path)
        write_tokenizer(tmp_path)
        server._model = HuggingFaceLM(str(tmp_path), torch.float32).model
        lm._is_doubtful = True
        with pytest.raises(Exception, match="is not the model that was probed at the start"):
            lm.generate(["x"], 2)
        lm.close()
