"""The served LM against a server on loopback: the same bits as its own scores, whatever happens on the way."""

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.config.errors import RunError, UserError
from replug.models.black_box_lm import Mixture
from replug.models.ensemble import Weighting
from replug.models.generation import GenerationOptions
from replug.models.http import connection as server_connection
from replug.models.http.completions_api import IllFormed, read_generated, read_scores
from replug.models.http.connection import ServerError
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import BudgetSpent, RequestBudget
from replug.models.http.server_source import connect
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.stand_in_lm import StandInLM
from tests.models.conftest import Opened
from tests.support.fault_server import THROTTLED, TRANSIENT, FaultServer, server_spec
from tests.support.lm_answers import bits, mixed, texts_of
from tests.support.tiny_lms import MAX_TOKENS, load_that_speaks, naive_logprobs
from tests.support.tokenizers import llama_with

WORDS = ["red", "blue", "green", "the", "boat", "of", "日本語", "🙂", "was", "new"]
SECRET = "sk-very-secret-1234"


def pairs(number: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Prefixes and continuations that are all different; the words are those of WORDS."""
    rng = np.random.default_rng(seed)
    prefixes = [" ".join(rng.choice(WORDS, 4 + row % 9)) for row in range(number)]
    return prefixes, ["".join(f" {word}" for word in rng.choice(WORDS, 1 + row % 5)) for row in range(number)]


def right(prefixes: list[str], continuations: list[str]) -> list[bytes]:
    return bits(StandInLM().score(prefixes, continuations))


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_scores_are_those_of_the_model_and_in_order(opened: Opened, api: str) -> None:
    prefixes, continuations = pairs(30)
    with FaultServer() as server:
        lm = opened(server, api=api)
        futures = [lm.submit(prefixes[:17], continuations[:17]), lm.submit(prefixes[17:], continuations[17:])]
        scores = [score for future in futures for score in future.result(100)]
    assert bits(scores) == right(prefixes, continuations)
    assert scores[0].token_logprobs.dtype == np.float32
    assert server.requests == 5 + 4
    assert {(payload["max_tokens"], payload["temperature"]) for payload in server.payloads} == {(1, 0)}


def test_no_more_requests_are_open_than_allowed_and_connections_stay_open(opened: Opened) -> None:
    prefixes, continuations = pairs(60)
    with FaultServer(seconds=0.01) as server:
        lm = opened(server, max_concurrency=3)
        for future in [lm.submit(prefixes[i : i + 6], continuations[i : i + 6]) for i in range(0, 60, 6)]:
            future.result(100)
        assert server.requests == 20
        assert server.most_open == 3
        assert len(server.connections) <= 3


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_that_passes_costs_one_more_attempt(opened: Opened, fault: str) -> None:
    prefixes, continuations = pairs(4)
    with FaultServer(first_faults=1, kinds=[fault]) as server:
        patience = 0.5 if fault in ("hang", "drip") else 60.0
        lm = opened(server, timeout_seconds=patience)
        assert bits(lm.score(prefixes, continuations)) == right(prefixes, continuations)
        attempts = 1 if fault == "reordered" else 2  # an order that the indices tell is no fault
        is_late = patience == 0.5 and server.requests > attempts  # so may be the good answer on a busy machine
        assert server.requests == attempts or is_late
        metrics = lm.metrics()
        assert (metrics["requests"], metrics["retries"]) == (server.requests, server.requests - 1)


def test_it_waits_as_long_as_the_server_asks(opened: Opened) -> None:
    with FaultServer(first_faults=1, kinds=["throttled_seconds"], retry_after="0.4") as server:
        opened(server).score(["a"], [" b"])
    assert 0.4 < server.times[1] - server.times[0] < 30


def test_times_to_retry_are_read_from_seconds_and_nonsense_is_none() -> None:
    def seconds(value: str) -> float:
        return server_connection.retry_after(httpx.Response(429, headers={"Retry-After": value}))

    assert (seconds("7"), seconds("0.5")) == (7, 0.5)  # OpenAI has fractions
    for nothing in ("", "-3", "soon", "nan", "inf", "Sun, 06 Nov 1994 08:49:37 GMT"):
        assert seconds(nothing) == 0
    assert server_connection.retry_after(httpx.Response(429)) == 0


@pytest.mark.parametrize(
    ("mode", "kind", "last"),
    [
        ("down", "none", "503 Service Unavailable: it is down"),
        ("honest", "drip", "no answer within 0.3 s"),
        ("honest", "nan", r"the log-prob of token \d of the continuation of an input is not finite"),
        ("honest", "wrong_count", "5 choices where 4 were wanted"),
    ],
)
def test_a_server_that_is_down_for_good_ends_in_bounded_time(opened: Opened, mode: str, kind: str, last: str) -> None:
    prefixes, continuations = pairs(400)
    with FaultServer(fault_share=1.0, kinds=[kind], mode=mode) as server:
        seconds = 0.3 if kind == "drip" else 60
        lm = opened(server, timeout_seconds=seconds, patience_minutes=0.001, max_concurrency=4)
        begun = time.monotonic()
        with pytest.raises(ServerError, match=r"did not answer in \d+ attempts.*; last: ") as info:
            lm.submit(prefixes, continuations).result(100)
        assert time.monotonic() - begun < 30
        assert re.search(last, str(info.value)) and server.url in str(info.value)
        assert server.requests <= 32  # the others were called off
        if mode == "down":
            server.mode = "honest"
            assert bits(lm.score(["a"], [" b"])) == right(["a"], [" b"]), "a later call tries again"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("down", "503 Service Unavailable: it is down"),
        ("drop", "RemoteProtocolError: Server disconnected without sending a response"),
    ],
)
def test_a_server_that_is_away_is_waited_for_with_a_line_for_all_requests(
    opened: Opened, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, says: str
) -> None:
    monkeypatch.setattr(server_connection, "SECONDS_WORTH_A_LINE", 0.05)
    prefixes, continuations = pairs(64)
    with FaultServer(fault_share=1.0, kinds=[kind]) as server:
        lm = opened(server, max_concurrency=16, timeout_seconds=60)
        waiting = lm.submit(prefixes, continuations)
        while server.requests < 16 * (server_connection.MAX_ATTEMPTS + 1):
            time.sleep(0.01)
        server.fault_share = 0.0
        scores = waiting.result(100)
    assert bits(scores) == right(prefixes, continuations)
    lines = [line for line in caplog.messages if line.startswith(f"waiting for {server.url}: {says}; next attempt in ")]
    assert 1 <= len(lines) <= 10  # of 16 requests that wait four times and more
    assert all("more (lm.patience_minutes)" in line for line in lines)


def test_patience_is_for_a_server_that_answers_nobody(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota that lets few requests through is not passed by waiting longer in all than for an answer."""
    monkeypatch.setattr(server_connection, "LONGEST_BACKOFF_SECONDS", 0.05)
    prefixes, continuations = pairs(240)
    with FaultServer(fault_share=0.8, kinds=["throttled"]) as server:
        lm = opened(server, max_concurrency=4, patience_minutes=1 / 60)
        begun = time.monotonic()
        assert bits(lm.score(prefixes, continuations)) == right(prefixes, continuations)
    assert time.monotonic() - begun > 1


def test_one_call_that_fails_leaves_the_others_alone(opened: Opened) -> None:
    with FaultServer(seconds=0.05, max_model_len=9) as server:
        lm = opened(server, max_concurrency=8)
        good = lm.submit(["a b"], [" c"])
        bad = lm.submit(["a " * 20 + "a"], [" c"])
        with pytest.raises(ServerError, match="400 Bad Request: maximum context length is 9 tokens"):
            bad.result(100)
        assert bits(good.result(100)) == right(["a b"], [" c"])
        assert server.requests == 2  # what will come again is not asked again


def test_an_input_beyond_the_context_is_an_error_with_its_lengths_before_anything_is_sent(opened: Opened) -> None:
    with FaultServer(max_model_len=9) as server:
        lm = opened(server)
        lm.max_tokens = 8
        assert lm.score(["red red red red red red"], [" blue blue"])[0].num_tokens == 2
        with pytest.raises(ValueError, match=r"input 1 has 7 \+ 2 tokens .* but the LM holds 8"):
            lm.submit(["red", "red red red red red red red"], [" blue", " blue blue"])
        with pytest.raises(ValueError, match=r"input 0 has 2 \+ 7 tokens"):
            texts_of(lm, ["red red"], 7)
        assert server.requests == 1


def test_a_server_that_was_never_reached_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "SECONDS_TO_REACH", 0.3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        begun = time.monotonic()
        with pytest.raises(UserError, match=rf"lm\.url: {nobody} cannot be reached; .* ConnectError"):
            connect(server_spec(nobody, patience_minutes=15), RequestBudget(None))
        assert time.monotonic() - begun < 30
    assert "http-lm" not in [thread.name for thread in threading.enumerate()]


def test_a_proxy_is_not_asked_for_this_machines_own_servers(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with FaultServer() as server:
        assert opened(server).score(["a"], [" b"])[0].num_tokens == 1


def test_the_key_is_sent_and_shown_nowhere(
    opened: Opened, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with FaultServer(api_key=SECRET) as server:
        monkeypatch.setenv("MY_KEY", SECRET)
        lm = opened(server, api_key_env="MY_KEY")
        lm.score(["a"], [" b"])
        server.api_key = "another"  # the server quotes the key that it was given, over two lines
        with pytest.raises(ServerError, match=r"401 Unauthorized: Invalid key: Bearer \*\*\*; .* MY_KEY") as info:
            lm.score(["a"], [" b"])
    shown = [str(info.value), repr(info.value), repr(lm), caplog.text]
    assert not any(SECRET in text for text in shown)


@pytest.mark.parametrize("key", ["sk-1\n", "sk 1", "sk-…"])
def test_a_key_that_no_header_may_hold_is_refused_without_quoting_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(UserError, match=r"the key in \$MY_KEY has white space or characters") as info:
        HttpLM(server_spec("http://x/v1", api_key_env="MY_KEY"), RequestBudget(None))
    assert "sk" not in str(info.value).replace("MY_KEY", "")


def test_generation_is_whole_in_order_and_ends_before_the_stop(opened: Opened) -> None:
    prompts = [f"{word} red {word}" for word in ["blue", "green", "boat", "the", "new"]]
    wanted = [f" {word} {word} fin" for word in ["blue", "green", "boat", "the", "new"]]
    with FaultServer(first_faults=2) as server:
        lm = opened(server, timeout_seconds=0.5)
        assert texts_of(lm, prompts, 3) == wanted
        assert texts_of(lm, prompts[:1], 3, stop=" fin") == [" blue blue"]
        assert server.payloads[-1]["stop"] == [" fin"]
        assert texts_of(lm, prompts[:1], 3, stop=["never", " fin"]) == [" blue blue"]
        assert server.payloads[-1]["stop"] == [" fin", "never"]


def test_a_server_cannot_sample_and_must_say_how_likely_its_answers_are(opened: Opened) -> None:
    with FaultServer(mode="no_logprobs") as server:
        lm = opened(server)
        with pytest.raises(UserError, match=r"temperature is 0.7; .* set temperature to 0, or take local weights"):
            lm.submit_answer("red", GenerationOptions(2, temperature=0.7))
        with pytest.raises(ValueError, match=r"sum to 0\.5"):
            lm.submit_answer(Mixture(["red"], [0.5]), GenerationOptions(2))
        assert server.requests == 0
        with pytest.raises(RunError, match="gives no log-probs of generated tokens"):
            mixed(lm, ["red"], [1.0], GenerationOptions(2))


def test_closing_breaks_off_what_is_under_way(opened: Opened) -> None:
    with FaultServer(fault_share=1, kinds=["hang"]) as server:
        lm = opened(server)
        waiting = lm.submit(*pairs(20))
        while not server.open:
            time.sleep(0.01)
        lm.close()
        with pytest.raises(RunError, match="was closed before its work was done"):
            waiting.result(100)
        with pytest.raises(RunError, match="is closed"):
            lm.submit(["a"], [" b"])
        lm.close()
    assert "http-lm" not in [thread.name for thread in threading.enumerate()]


def test_the_budget_of_tokens_is_used_up_though_bounds_are_reserved_first(opened: Opened) -> None:
    prefixes, continuations = pairs(40)
    with FaultServer(seconds=0.01) as server:
        whole = opened(server)
        whole.score(prefixes, continuations)
        needed = server.tokens
        lm = opened(server, RequestBudget(None, max_tokens=needed + 250))
        assert len(lm.score(prefixes, continuations)) == 40
        assert server.tokens == 2 * needed
        with pytest.raises(BudgetSpent, match=r"lm\.max_tokens_sent="):
            lm.score(prefixes, continuations)
        assert server.tokens <= 3 * needed + 250


def test_what_a_throttled_server_did_not_read_costs_no_tokens(opened: Opened) -> None:
    budget = RequestBudget(None)
    with FaultServer(first_faults=3, kinds=THROTTLED) as server:
        opened(server, budget).score(["red blue"], [" red"])
        assert (budget.requests, budget.tokens) == (4, server.tokens)


IDS = ([1], [2])


def answer(**logprobs: object) -> dict:
    return {"choices": [{"index": 0, "text": "", "logprobs": logprobs}]}


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"choices": [{"index": [0], "logprobs": {}}]},
        {"choices": [{"index": 0}, {"index": 0}]},
        {"choices": [{"index": 0, "logprobs": [1, 2]}]},
        answer(token_logprobs=[None, -1.0, -1.0, -1.0]),
        *(
            {"choices": [{"index": 0, "prompt_logprobs": entries}]}
            for entries in (5, [None], [None, None], [None, {"3": {"logprob": -1.0}}], [None, {"2": -1.0}])
        ),
    ],
)
def test_an_answer_that_is_not_well_formed_is_a_fault(body: object) -> None:
    for api in ("echo", "prompt_logprobs"):
        with pytest.raises(IllFormed):
            read_scores(api, [IDS], body)


def test_nothing_generated_is_an_empty_text() -> None:
    body = {"choices": [{"index": 0, "text": "", "logprobs": None}]}
    assert [(answer.text, answer.num_tokens) for answer, _ in read_generated(body)] == [("", 0)]
    with pytest.raises(IllFormed):
        read_generated({"choices": [{"index": 0, "text": None}]})


# A server of real weights: its scores, and its answers to several prompts, are those of the same weights here ----


class HFServer(FaultServer):
    """A FaultServer whose answers are those of `model`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        super().__init__(**options)
        self._model, self._tokenizer = model, tokenizer

    def _split(self, prompt: str | list[int]) -> list[Any]:
        return self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _choice(self, index: int, words: list[Any], payload: dict, sample: int) -> dict:
        ids = list(words)
        while len(ids) < len(words) + payload["max_tokens"] and self._tokenizer.eos_token_id not in ids[len(words) :]:
            ids.append(int(self._logprobs(ids)[-1].argmax()))
        values = [None, *(float(row[token]) for row, token in zip(self._logprobs(ids), ids[1:], strict=False))]
        shown = slice(0 if payload.get("echo") else len(words), None)
        logprobs = {
            "tokens": [self._tokenizer.decode([token]) for token in ids[shown]],
            "token_logprobs": values[shown],
        }
        text = self._tokenizer.decode(ids[shown], skip_special_tokens=True)
        ends = "length" if len(ids) == len(words) + payload["max_tokens"] else "stop"
        choice = {"index": index, "text": text, "finish_reason": ends, "logprobs": logprobs}
        if "prompt_logprobs" in payload:
            entries = [{str(i): {"logprob": v}} for i, v in zip(words[1:], values[1:], strict=False)]
            return choice | {"prompt_logprobs": [None, *entries]}
        return choice

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


PROMPTS = ["the cat sat on the mat", "a much longer prefix of the cat", "x", "the beginning of a text: the cat"]
WEIGHTS = [0.4, 0.3, 0.2, 0.1]
MIXTURES = [Mixture(PROMPTS, WEIGHTS), Mixture(PROMPTS, WEIGHTS, Weighting(0.05))]


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
    def local_scores(answer: str) -> np.ndarray:
        return np.array([naive_logprobs(local, prompt, answer) for prompt in PROMPTS])

    lm = opened(server, timeout_seconds=60, tokenizer=folder)
    found, moved = lm.generate(MIXTURES, GenerationOptions(4))
    answers = [texts_of(lm, [prompt], 4)[0] for prompt in PROMPTS]
    masses = {}
    for answer in dict.fromkeys(answers):
        masses[answer] = float(np.log(WEIGHTS @ np.exp(local_scores(answer))).sum())
    best = max(masses, key=masses.__getitem__)
    assert found.text == best and found.sum_logprob == pytest.approx(masses[best], abs=1e-3)
    assert found.num_tokens == local_scores(best).shape[1]
    moving = MIXTURES[1].moving()
    logprob = sum(moving.see(token) for token in local_scores(moved.text).T)
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
