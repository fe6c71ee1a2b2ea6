"""Servers of other shapes, byte for byte as they answer: chats, and gateways such as Azure's (its REST reference)."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from replug.config import rules
from replug.config.choices import Teacher
from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models.build import lm_source
from replug.models.http.request_budget import RequestBudget
from replug.models.http.server_source import connect
from replug.models.lm_source import TeacherLM
from tests.support.fault_server import (
    MODEL,
    FaultServer,
    server_spec,
)

KEY = "sk-of-azure-1234"


pytestmark = pytest.mark.usefixtures("two_attempts")


class ShapedServer(FaultServer):
    """A server with another path and shape. It keeps the headers, queries and requests that it got."""

    def __init__(self, yes: float | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.yes, self.seen = yes, []

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    async def _answer(self, request: web.Request, payload: dict) -> web.StreamResponse:
        self.payloads.append(payload)
        self.seen.append((dict(request.headers), dict(request.query)))
        return web.json_response(self.shaped(payload))


def chat_logprobs(tokens: list[tuple[str, float]], tops: list[tuple[str, float]]) -> dict:
    def entry(text: str, logprob: float) -> dict:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {"content": [{**entry(*token), "top_logprobs": [entry(*top) for top in tops]} for token in tokens]}


class Azure(ShapedServer):
    """A deployment behind Azure's gateway, which wants `api-version`, and lists no models."""

    paths = ("/openai/deployments/small/chat/completions",)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "404", "message": "Resource not found"}}, status=404)

    async def _answer(self, request: web.Request, payload: dict) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            said = f"Access denied due to invalid subscription key: {request.headers['Authorization']}"
            return web.json_response({"error": {"code": "401", "message": said}}, status=401)
        return await super()._answer(request, payload)

    def shaped(self, payload: dict) -> dict:
        yes = self.yes if "boat" in payload["messages"][0]["content"] else 1 - self.yes
        tops = [("Yes", math.log(yes)), ("No", math.log(1 - yes) - 0.1)]
        choice = {
            **{"content_filter_results": {"hate": {"filtered": False}}, "finish_reason": "stop", "index": 0},
            "logprobs": chat_logprobs(tops[:1], tops) | {"refusal": None} if payload.get("logprobs") else None,
            "message": {"annotations": [], "content": "Yes", "refusal": None, "role": "assistant"},
        }
        return {"choices": [choice], "usage": {"completion_tokens": 1, "prompt_tokens": 20, "total_tokens": 21}}


def azure_spec(server: ShapedServer, **changes: Any) -> LMConfig:
    url = f"{server.root}/openai/deployments/small/chat/completions?api-version=2024-10-21"
    return server_spec(url, **{"api": "chat", "score": Teacher.yes} | changes)


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Azure]:
    monkeypatch.setenv("REPLUG_LM_API_KEY", KEY)
    with Azure(yes=0.8) as server:
        yield server


def test_a_gateway_gets_the_key_and_its_version_and_says_yes(azure: Azure, tmp_path: Any) -> None:
    source = lm_source(azure_spec(azure), tmp_path / "budget.json", tmp_path / "scores.sqlite")
    lm = source.open(azure_spec(azure))
    scores = lm.score(["a boat", "a cloud"], [" x", " x"])
    lm.close()
    assert [score.sum_logprob for score in scores] == pytest.approx([math.log(0.8), math.log(0.2)], abs=1e-6)
    assert source.identity == f"{MODEL} chat yes"
    headers, query = azure.seen[-1]
    assert query == {"api-version": "2024-10-21"}
    assert headers["Authorization"] == f"Bearer {KEY}"
    azure.payloads.clear()
    spec = azure_spec(azure, score=Teacher.answer)
    lm = lm_source(spec, tmp_path / "budget.json", tmp_path / "scores.sqlite").open(spec)
    assert [score.sum_logprob for score in lm.score(["a boat", "a cloud"], [" yes!", " no"])] == [1.0, 0.0]
    lm.close()
    assert not any("logprobs" in payload for payload in azure.payloads), "an answer needs none"


@pytest.mark.parametrize("body", [{}, "no", {"choices": [{"index": 0}]}, [{"text": "x"}], None])
def test_an_answer_of_another_shape_is_a_fault(body: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Azure, "paths", ("/v1/chat/completions",))
    monkeypatch.setattr(Azure, "shaped", lambda self, payload: body)
    monkeypatch.setenv("REPLUG_LM_API_KEY", KEY)
    with Azure() as server, pytest.raises(UserError, match=r"the answer (is not of the expected form|has )"):
        connect(server_spec(server.url, api="chat", score=Teacher.answer), RequestBudget(None))


class Chat(ShapedServer):
    """A chat that answers "Rhine" from a document that names it, in the manner of one of the servers of 2026."""

    paths = ("/v1/chat/completions",)

    def __init__(self, manner: str, **how: Any) -> None:
        super().__init__(**how)
        self.manner = manner

    async def _answer(self, request: web.Request, payload: dict) -> web.StreamResponse:
        self.payloads.append(payload)
        text, manner = payload["messages"][0]["content"], self.manner
        answer, is_hostile = "Rhine" if "Rhine" in text else "no idea", "battle" in text
        thought = "<think>\nOkay, the user wants\na river.\n</think>\n\n"
        thinks = (payload.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        if manner == "new fields" and (
            wrong := next((n for n in ("max_tokens", "temperature", "stop") if n in payload), "")
        ):
            return refused("not supported with this model", "unsupported_parameter", wrong)
        if manner == "filter" and is_hostile:
            return refused("The response was filtered due to the prompt", "content_filter", "prompt")
        if manner == "an error" and not self.seen:
            self.seen.append(({}, {}))
            return web.json_response({"error": {"message": "model overloaded", "code": 502}})
        said: dict[str, Any] = {"content": answer, "finish_reason": "stop"}
        if manner == "withheld" and is_hostile:
            said = {"content": None, "finish_reason": "content_filter"}
        if manner == "refusal" and is_hostile:
            said = {"content": None, "refusal": "I cannot help with that.", "finish_reason": "stop"}
        if manner == "thought" and thinks:
            said["content"] = thought + answer
        if manner == "parts":
            said["content"] = [{"type": "thinking", "thinking": []}, {"type": "text", "text": answer}]
        if manner == "only thought" and thinks:
            said = {"content": None, "reasoning": "Okay, the user wants", "finish_reason": "length"}
        if manner == "cut thought" and thinks:
            said["content"] = "<think>"  # at the stop
        choice = {"index": 0, "finish_reason": said.pop("finish_reason"), "message": {"role": "assistant", **said}}
        return web.json_response({"choices": [choice], "usage": {"total_tokens": 42}})


def refused(message: str, code: str, param: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code, "param": param}}, status=400)


DOCUMENTS = ["Basel lies on the Rhine.", "Bread is baked.", "A battle was fought."]


def chat_scores(server: ShapedServer, **changes: Any) -> list[float]:
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
    assert len(caplog.messages) == len(said)
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


def test_an_error_that_came_as_an_answer_is_said_in_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chat, "_answer", lambda self, request, payload: _overloaded())
    with Chat("") as server, pytest.raises(UserError, match="the answer is an error: 502: model overloaded"):
        chat_scores(server, patience_minutes=0.001)


async def _overloaded() -> web.Response:
    return web.json_response({"error": {"message": "model overloaded", "code": 502}})


def test_fields_of_a_request_that_scores_rest_on_are_not_the_users(tmp_path: Any) -> None:
    for extra, score, says in (
        ({"logprobs": 3}, Teacher.answer, "lm.extra_body has logprobs, which replug sets itself"),
        ({"temperature": 1}, Teacher.yes, "lm.extra_body has temperature, which replug sets itself"),
    ):
        lm = server_spec("http://127.0.0.1:1/v1", api="chat", score=score, extra_body=extra)
        assert any(says in problem for problem in rules._server_problems(lm))
    assert not list(rules._server_problems(server_spec("http://h/v1", score=Teacher.answer, extra_body={"seed": 1})))
