"""A server in this process, over a small index: its app with a client, as one would have it over HTTP."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerBase

from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.models.black_box_lm import BlackBoxLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from replug.serving.access import BoundedConnection
from replug.serving.app import create_app, listen
from replug.serving.openai_api import ServingLimits
from replug.serving.service import ServedIndex, Service

TEXTS = [" ".join(topic[:6]) for topic in stand_in_vocabulary()[:4]]  # of words that the stand-in encoder knows
LIMITS = ServingLimits(max_new_tokens=40, timeout_seconds=60)


def service_of(
    root: Path,
    lm: BlackBoxLM | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int | None = None,
    limits: ServingLimits = LIMITS,
) -> Service:
    """Answers from 2 documents, by the stand-in unless an LM is given."""
    template = PromptTemplate(tokenizer, max_tokens)
    return Service(lm or StandInLM(), template, 2, ServedIndex(root), limits, chats=tokenizer)


def client_of_app(app: FastAPI, token: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://127.0.0.1",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=60,
    )


def ask(service: Service, test: Callable, token: str | None = None):
    """Return what `test(client)` returns, with the service behind its app."""

    async def run():
        app = create_app(service, token)
        async with app.router.lifespan_context(app), client_of_app(app, token) as client:
            return await test(client)

    return asyncio.run(run())


def completion(prompt: object, **others: object) -> dict:
    return {"path": "/v1/completions", "model": "replug", "prompt": prompt, "max_tokens": 12, **others}


def body_of(request: dict) -> dict:
    return {name: value for name, value in request.items() if name != "path"}


async def post(client: httpx.AsyncClient, path: str, **body: object) -> dict:
    done = await client.post(path, json=body)
    assert done.status_code == 200, done.text
    return done.json()


def events(stream: str) -> list:
    """The events of a stream that has ended."""
    *rows, end = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(row) for row in rows]


@contextmanager
def listening(service: Service, token: str | None = None) -> Iterator[str]:
    """The address of the server on a port of this machine, for clients that open connections."""
    with listen("127.0.0.1", 0) as listener:
        listener.listen()  # a connection that comes before the server accepts waits
        config = uvicorn.Config(create_app(service, token), log_config=None, http=BoundedConnection)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
