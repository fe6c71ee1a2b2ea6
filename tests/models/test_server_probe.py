"""The probe of servers that are wrong in known ways; and chats and gateways, byte for byte as they answer."""

import math
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from replug.config import rules
from replug.config.choices import Teacher
from replug.config.errors import UserError
from replug.models.build import lm_source
from replug.models.http import server_source as server_probe
from replug.models.http.request_budget import RequestBudget
from replug.models.http.server_source import connect
from replug.models.lm_source import TeacherLM
from replug.models.local.stand_in_lm import StandInLM
from tests.support.fault_server import MODEL, FaultServer, server_spec, word_tokenizer, write_word_tokenizer
from tests.support.lm_answers import bits

KEY = "sk-of-azure-1234"

pytestmark = pytest.mark.usefixtures("two_attempts")


def refusal(server: FaultServer, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        connect(server_spec(server.url, **{"patience_minutes": 0.001} | changes), RequestBudget(None))
    message = str(caught.value)
    assert server.url in message and "\n" not in message
    assert "http-lm" not in [thread.name for thread in threading.enumerate()]
    return message


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_an_honest_server_passes_and_gets_a_fingerprint(api: str) -> None:
    with FaultServer() as server:
        lm = connect(server_spec(server.url, api=api), RequestBudget(None))
        lm.close()
        again = connect(server_spec(server.url), RequestBudget(None))
        again.close()
    assert lm.fingerprint.dtype == np.float32
    assert lm.fingerprint.tobytes() == again.fingerprint.tobytes()
    assert lm.identity == again.identity and lm.identity.startswith(f"{MODEL}#")


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("shifted", "gives a prompt's tokens the wrong log-probs: 12 tokens that it generated with .* when sent back"),
        ("no_logprobs", "gives no log-probs of the prompt .* set lm.score=yes or answer"),
        ("no_echo", "gives no log-probs of the prompt .* set lm.score=yes or answer"),
        ("length_dependent", "gives the same tokens other log-probs in a longer text"),
        ("constant", "log-probs that do not follow the text: a document that holds the very text"),
        ("down", "did not answer in \\d+ attempts .*; last: 503 Service Unavailable: it is down"),
    ],
)
def test_a_server_that_is_wrong_for_good_is_refused_with_the_reason(mode: str, reason: str) -> None:
    with FaultServer(mode=mode) as server:
        message = refusal(server)
    assert re.search(reason, message), message


@pytest.mark.parametrize("form", [" {}/ ", "{}/completions", "{}/chat/completions/"])
def test_an_address_is_taken_as_people_copy_it(form: str) -> None:
    with FaultServer() as server:
        lm = connect(server_spec(form.format(server.url)), RequestBudget(None))
        lm.close()
    assert lm.url == server.url


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("http://{}", r"404 Not Found.*; expected lm.url to be such as http://HOST:PORT/v1, and lm.model a name"),
        ("localhost:8000", r"lm.url is localhost:8000; expected http://HOST:PORT/v1$"),
        ("http://{}/v1?api-key=2024-10-21", r"lm.url holds a secret or a query; expected lm.url=http://{}/v1\. "),
        ("http://me:hunter2@{}/v1", r"lm.url holds a secret or a query; expected http://HOST:PORT/v1\. "),
        ("grpc://{}/v1", r"lm.url is grpc://{}/v1; expected http://HOST:PORT/v1$"),
        ("http://[::1/v1", r"expected http://HOST:PORT/v1$"),
    ],
)
def test_another_address_is_refused_with_the_right_one_and_no_password(form: str, says: str) -> None:
    with FaultServer() as server, pytest.raises(UserError) as caught:
        host = f"127.0.0.1:{server.port}"
        connect(server_spec(form.replace("{}", host)), RequestBudget(None))
    assert re.search(says.replace("{}", host), str(caught.value)), str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("mode", ["one_input", "crowded"])
def test_a_server_that_is_wrong_about_several_inputs_gets_one_a_request(mode: str) -> None:
    prefixes, continuations = ["the red boat", "a boat", "the boat"], [" red", " boat", " the"]
    with FaultServer(mode=mode) as server:
        lm = connect(server_spec(server.url, patience_minutes=0.001), RequestBudget(None))
        scores = lm.score(prefixes, continuations)
        lm.close()
    assert bits(scores) == bits(StandInLM().score(prefixes, continuations))
    assert all(len(payload["prompt"]) == 1 for payload in server.payloads[-3:])


def test_a_shifted_server_and_another_models_tokenizer_are_refused(tmp_path: Path) -> None:
    other = write_word_tokenizer(tmp_path, [server_probe.HELPFUL[::-1]])
    for mode, own in (("shifted", word_tokenizer()), ("", other)):
        for api in ("echo", "prompt_logprobs"):
            with FaultServer(mode=mode) as server:
                assert "wrong log-probs" in refusal(server, tokenizer=own, api=api)


RIGHT, PLAIN = -np.arange(1, 21, dtype=np.float32), np.full(20, -30.0)
LONG = np.concatenate([RIGHT + 0.1, [-1.0]])  # as rounding may move it


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "None"),
        ({"long": LONG[:20]}, "in a longer text"),  # which is not longer
        ({"long": LONG + 0.1}, "in a longer text"),
        ({"long": LONG - 1.5 * np.eye(21)[7]}, "in a longer text"),  # one token is far away
        ({"echoed": [RIGHT - 8.5, RIGHT]}, "nats each have -14.75 when sent back"),
        ({"echoed": [RIGHT[1:] - 8.5, RIGHT]}, "None"),  # what comes back in other tokens does not count
        ({"echoed": [RIGHT[1:], RIGHT[1:]]}, "generates nothing that can be sent back"),
        ({"others": [PLAIN, RIGHT - 0.4]}, "only 0.40 nats"),
    ],
)
def test_a_shortcoming_is_found_in_arrays(changes: dict, says: str) -> None:
    answers = {"generated": [RIGHT, RIGHT], "echoed": [RIGHT, RIGHT]}
    honest = {"short": RIGHT, "long": LONG, "others": [PLAIN, PLAIN - 1], **answers}
    assert says in str(server_probe.find_shortcoming(**honest | changes))


# Servers of other shapes: chats, and gateways such as Azure's (its REST reference) -------------------------------


def error_answer(code: str, message: str, status: int, **more: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message, **more}}, status=status)


class Azure(FaultServer):
    """A deployment behind Azure's gateway, which wants `api-version`, lists no models, and finds boats likely."""

    paths = ("/openai/deployments/small/chat/completions",)

    async def _models(self, request: web.Request) -> web.Response:
        return error_answer("404", "Resource not found", 404)

    async def _answer(self, request: web.Request, payload: dict) -> web.StreamResponse:
        self.payloads.append(payload)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return error_answer("401", f"Access denied: invalid key {request.headers['Authorization']}", 401)
        if dict(request.query) != {"api-version": "2024-10-21"}:
            return error_answer("404", "Resource not found", 404)
        return web.json_response(self.shaped(payload))

    def shaped(self, payload: dict) -> object:
        yes = 0.8 if "boat" in payload["messages"][0]["content"] else 0.2
        entries = [
            {"token": text, "logprob": math.log(share), "bytes": list(text.encode())}
            for text, share in (("Yes", yes), ("No", 0.9 - yes))
        ]
        choice = {
            **{"content_filter_results": {"hate": {"filtered": False}}, "finish_reason": "stop", "index": 0},
            "logprobs": {"content": [entries[0] | {"top_logprobs": entries}], "refusal": None},
            "message": {"annotations": [], "content": "Yes", "refusal": None, "role": "assistant"},
        }
        if not payload.get("logprobs"):
            choice["logprobs"] = None
        return {"choices": [choice], "usage": {"completion_tokens": 1, "prompt_tokens": 20, "total_tokens": 21}}


@pytest.mark.parametrize(
    ("score", "continuations", "expected"),
    [(Teacher.yes, [" x", " x"], [math.log(0.8), math.log(0.2)]), (Teacher.answer, [" yes!", " no"], [1.0, 0.0])],
)
def test_a_gateway_gets_the_key_and_its_version_and_says_yes(
    score: Teacher, continuations: list[str], expected: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPLUG_LM_API_KEY", KEY)
    with Azure() as server:
        url = f"{server.url.removesuffix('/v1')}{server.paths[0]}?api-version=2024-10-21"
        spec = server_spec(url, api="chat", score=score)
        source = lm_source(spec, tmp_path / "budget.json", tmp_path / "scores.sqlite")
        lm = source.open(spec)
        scores = lm.score(["a boat", "a cloud"], continuations)
        lm.close()
    assert [score.sum_logprob for score in scores] == pytest.approx(expected, abs=1e-6)
    assert source.identity == f"{MODEL} chat {score}"
    assert score == Teacher.yes or not any("logprobs" in payload for payload in server.payloads)


@pytest.mark.parametrize("body", [{}, {"choices": [{"index": 0}]}, [{"text": "x"}], None])
def test_an_answer_of_another_shape_is_a_fault(body: object, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: FaultServer, request: web.Request, payload: dict) -> web.Response:
        return web.json_response(body)

    monkeypatch.setattr(Chat, "_answer", answer)
    with Chat("") as server, pytest.raises(UserError, match=r"the answer (is not of the expected form|has )"):
        connect(server_spec(server.url, api="chat", score=Teacher.answer), RequestBudget(None))


class Chat(FaultServer):
    """A chat that answers "Rhine" from a document that names it, in the manner of one of the servers of 2026."""

    paths = ("/v1/chat/completions",)

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.manner = manner

    async def _answer(self, request: web.Request, payload: dict) -> web.StreamResponse:
        self.payloads.append(payload)
        text, manner = payload["messages"][0]["content"], self.manner
        answer, is_hostile = "Rhine" if "Rhine" in text else "no idea", "battle" in text
        thinks = (payload.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        wrong = next((name for name in ("max_tokens", "temperature", "stop") if name in payload), "")
        if manner == "new fields" and wrong:
            return error_answer("unsupported_parameter", "not supported with this model", 400, param=wrong)
        if manner == "filter" and is_hostile:
            return error_answer("content_filter", "The response was filtered due to the prompt", 400, param="prompt")
        if manner == "errors" or (manner == "an error" and len(self.payloads) == 1):
            return error_answer("502", "model overloaded", 200)
        said: dict[str, Any] = {"content": answer, "finish_reason": "stop"}
        if manner == "withheld" and is_hostile:
            said = {"content": None, "finish_reason": "content_filter"}
        if manner == "refusal" and is_hostile:
            said = {"content": None, "refusal": "I cannot help with that.", "finish_reason": "stop"}
        if manner == "thought" and thinks:
            said["content"] = f"<think>\nOkay, the user wants\na river.\n</think>\n\n{answer}"
        if manner == "parts":
            said["content"] = [{"type": "thinking", "thinking": []}, {"type": "text", "text": answer}]
        if manner == "only thought" and thinks:
            said = {"content": None, "reasoning": "Okay, the user wants", "finish_reason": "length"}
        if manner == "cut thought" and thinks:
            said["content"] = "<think>"  # at the stop
        choice = {"index": 0, "finish_reason": said.pop("finish_reason"), "message": {"role": "assistant", **said}}
        return web.json_response({"choices": [choice], "usage": {"total_tokens": 42}})


DOCUMENTS = ["Basel lies on the Rhine.", "Bread is baked.", "A battle was fought."]


def chat_scores(server: Chat, **changes: Any) -> list[float]:
    spec = server_spec(server.url, **{"api": "chat", "score": Teacher.answer} | changes)
    server_lm = connect(spec, RequestBudget(None))
    try:
        lm = TeacherLM(server_lm, "", spec.score)
        return [score.sum_logprob for score in lm.score(DOCUMENTS, [" Rhine"] * len(DOCUMENTS))]
    finally:
        server_lm.close()


@pytest.mark.parametrize(
    ("manner", "said"),
    [
        ("plain", []),
        ("parts", []),
        ("an error", []),
        ("new fields", ["does not take temperature=0, so it draws answers by its own settings"]),
        ("filter", ["filter gives no answer to the prompt that begins with 'A battle was fought.'"]),
        ("withheld", ["filter gives no answer to the prompt that begins with 'A battle was fought.'"]),
        ("refusal", ["filter gives no answer to the prompt that begins with 'A battle was fought.'"]),
    ],
)
def test_a_chats_answer_is_read_as_the_server_writes_it(manner: str, said: list[str], caplog: Any) -> None:
    with Chat(manner) as server:
        assert chat_scores(server) == [1.0, 0.0, 0.0]
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))
    if manner == "new fields":
        assert "max_completion_tokens" in server.payloads[-1]


@pytest.mark.parametrize("manner", ["only thought", "cut thought", "thought"])
def test_reasoning_is_refused_until_it_is_turned_off(manner: str) -> None:
    with Chat(manner) as server:
        with pytest.raises(UserError, match=r"some of its 4 tokens on reasoning.*lm\.extra_body.*enable_thinking"):
            chat_scores(server)
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert chat_scores(server, extra_body=off) == [1.0, 0.0, 0.0]
        assert chat_scores(server, extra_body=off | {"max_tokens": 900}) == [1.0, 0.0, 0.0]
    assert server.payloads[-1]["max_tokens"] == 900
    assert "stop" not in server.payloads[-1]


def test_an_error_that_came_as_an_answer_is_said_in_the_servers_words() -> None:
    with Chat("errors") as server, pytest.raises(UserError, match="the answer is an error: 502: model overloaded"):
        chat_scores(server, patience_minutes=0.001)


def test_fields_of_a_request_that_scores_rest_on_are_not_the_users() -> None:
    for extra, score, says in (
        ({"logprobs": 3}, Teacher.answer, "lm.extra_body has logprobs, which replug sets itself"),
        ({"temperature": 1}, Teacher.yes, "lm.extra_body has temperature, which replug sets itself"),
    ):
        lm = server_spec("http://127.0.0.1:1/v1", api="chat", score=score, extra_body=extra)
        assert any(says in problem for problem in rules._server_problems(lm))
    assert not list(rules._server_problems(server_spec("http://h/v1", score=Teacher.answer, extra_body={"seed": 1})))
