"""Limits of the server: tokens, hosts, bytes, time and connections; disconnects."""

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from replug.config.errors import UserError
from replug.models.black_box_lm import Mixture
from replug.models.generation import Generated, GenerationOptions
from replug.models.local.stand_in_lm import StandInLM
from replug.serving import access
from replug.serving.access import MAX_BODY_BYTES, TOKEN_VARIABLE, token_for
from replug.serving.app import create_app
from replug.serving.openai_api import ServingLimits
from tests.support.serving import TEXTS, ask, body_of, client_of_app, completion, listening, service_of
from tests.support.small_index import write_small_index
from tests.support.tiny_lms import MAX_TOKENS, load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_index(tmp_path_factory.mktemp("served"), TEXTS)


# Access ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "localhost.example.org", ""])
def test_beyond_loopback_a_token_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert [token_for(loopback) for loopback in ("127.0.0.1", "::1", "[::1]", "localhost")] == [None] * 4
    with pytest.raises(UserError, match=f"--host {host} can be reached by others; expected a token"):
        token_for(host)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert token_for(host) == TOKEN


@pytest.mark.parametrize("token", ["", "short", "0123456789 abcdef", "0123456789abcdé", "0123456789abcdef\n"])
def test_a_weak_token_is_refused_and_not_shown(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(UserError, match="is not a token; expected 16") as caught:
        token_for("127.0.0.1")
    assert not token or token not in str(caught.value)


def test_all_but_health_is_behind_the_token(root: Path) -> None:
    async def test(client):
        for given in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN):
            for path in ("/v1/models", "/nothing/7"):
                done = await client.get(path, headers={"Authorization": given})
                assert (done.status_code, done.json()["error"]["code"]) == (401, "invalid_api_key"), given
            assert (await client.get("/health", headers={"Authorization": given})).status_code == 200
        assert (await client.get("/v1/models", headers={"Authorization": f"bearer {TOKEN}"})).status_code == 200
        return (await client.get("/v1/models", headers={"Host": "example.org"})).json()

    models = ask(service_of(root), test, TOKEN)
    assert [one["id"] for one in models["data"]] == ["replug", "retriever"]
    assert models["data"][0]["replug"]["lm"] == StandInLM().identity


def test_hosts_pages_of_browsers_and_bodies_that_must_not_be_read_are_refused(root: Path) -> None:
    async def parts():
        yield b"{}"

    own = {"Content-Type": "application/json; charset=utf-8"}
    hosts = ["127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1", "example.org", "127.0.0.1.example.org:8080", ""]
    asked = [
        *(({"Host": host, **own}, b'{"query": "x"}') for host in hosts),
        *((own | {"Origin": origin}, b'{"query": "x"}') for origin in ("http://evil.example", "null")),
        ({"Content-Type": "text/plain"}, b'{"query": "x"}'),
        (own, b" " * (MAX_BODY_BYTES + 1)),
        (own, parts),  # of unknown length
    ]

    async def test(client):
        sent = [(headers, content() if callable(content) else content) for headers, content in asked]
        return [(await client.post("/search", content=body, headers=headers)).status_code for headers, body in sent]

    assert ask(service_of(root), test) == [200, 200, 200, 403, 403, 403, 403, 403, 400, 413, 411]
    no_page_has_the_token = [200] * 8
    assert ask(service_of(root), test, TOKEN) == [*no_page_has_the_token, 400, 413, 411]


def test_requests_that_never_arrive_are_closed(root: Path, monkeypatch) -> None:
    monkeypatch.setattr(access, "SECONDS_TO_ARRIVE", 0.5)
    head = b"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    halves = [b"", b"GET /hea", head, head + b"Content-Length: 99\r\n\r\n{"]
    with listening(service_of(root)) as url, ExitStack() as opened:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        held = [opened.enter_context(socket.create_connection(address, timeout=60)) for _ in range(40)]
        for number, one in enumerate(held):
            with suppress(OSError):  # of those that are closed already
                one.sendall(halves[number % len(halves)])
        for one in held:
            with suppress(OSError):
                while one.recv(1 << 16):  # nothing more comes when the server has closed it
                    pass
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "ready"


# Time, disconnects ------------------------------------------------------------------------------------------------


class EndlessLM(StandInLM):
    """Lengthens every answer until nobody wants it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.began = threading.Event()

    def generate(self, mixtures: Sequence[Mixture], options: GenerationOptions, watch=None) -> list[Generated]:
        text = "a"
        while watch(0, text):
            text += "a"
            self.began.set()
            threading.Event().wait(0.001)
        self.lengths.append(len(text))
        return [Generated(text, np.zeros(len(text)), prompt_tokens=1) for _ in mixtures]


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_ends_in_the_lm_too(root: Path, stream: bool) -> None:
    lm, asked = EndlessLM(), completion("x", stream=stream)
    service = service_of(root, lm, limits=ServingLimits(timeout_seconds=0.5))
    done = ask(service, lambda client: client.post(asked["path"], json=body_of(asked)))
    assert "longer than 0.5 s" in done.text
    assert done.status_code == (200 if stream else 504)  # of a stream the status was sent before
    assert lm.began.is_set() and len(lm.lengths) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_answer(root: Path, stream: bool) -> None:
    lm = EndlessLM()
    service = service_of(root, lm)
    body, gone, sent = json.dumps(body_of(completion("x", stream=stream))).encode(), asyncio.Event(), []
    headers = {"host": "127.0.0.1", "content-length": str(len(body)), "content-type": "application/json"}
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    parts = [{"type": "http.request", "body": body}]

    async def receive():
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    async def test():
        app = create_app(service, None)
        async with app.router.lifespan_context(app), client_of_app(app) as client:
            asking = asyncio.create_task(app(scope, receive, send))
            while not lm.began.is_set():
                await asyncio.sleep(0.01)
            gone.set()
            await asking
            while not lm.lengths:
                await asyncio.sleep(0.01)
            return await client.post("/search", json={"query": "x"})

    assert asyncio.run(test()).status_code == 200
