"""A server in this process, over a small index: its app with a client, as one would have it over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.models.black_box_lm import BlackBoxLM
from replug.serving.app import create_app
from replug.serving.batching import Metrics
from replug.serving.index_holder import IndexHolder, open_served_index, state_of
from replug.serving.requests import ServingLimits
from replug.serving.service import Prompting, Service

TEXTS = [" ".join(topic[:6]) for topic in stand_in_vocabulary()[:4]]  # of words that the stand-in encoder knows
LOOK_SECONDS = 0.02


def opener(root: Path, lm: BlackBoxLM, prompting: Prompting, limits: ServingLimits, k: int = 2):
    """What `create_app` opens."""

    async def open_service(metrics: Metrics) -> Service:
        index = IndexHolder(lambda: open_served_index(root), lambda: state_of(root), metrics, LOOK_SECONDS)
        return Service(lm, prompting, k, index, limits, metrics)

    return open_service


@asynccontextmanager
async def served(open_service, limits: ServingLimits, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, once that is ready; `client.app` is the app itself."""
    app = create_app(open_service, limits, token, lambda: None)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://127.0.0.1",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=60,
        ) as client,
    ):
        client.app = app
        while (await client.get("/health")).status_code != 200:
            assert app.state.opened.error is None, app.state.opened.error
            await asyncio.sleep(0.01)
        yield client
