"""The server's process: it listens, loads, answers, and ends when it is told to.

SIGTERM and Ctrl-C end it well: it takes no more requests and answers those that it has, at most as long as a request
may take; a second Ctrl-C does not wait for them.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from replug.cluster.background import in_background
from replug.config.errors import UserError
from replug.index_workers.build_plan import index_folder
from replug.models.lm_source import LMSource
from replug.models.local.local_source import LocalSource
from replug.serving.app import create_app
from replug.serving.batching import Metrics
from replug.serving.index_holder import IndexHolder, open_served_index, state_of
from replug.serving.requests import ServingLimits
from replug.serving.service import Prompting, Service

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: an index's folder or a run's, and an LM that has been reached.

    `spread` lays local weights over all GPUs; `temperature` is the ensemble's, None for the retriever's own.
    """

    directory: Path
    source: LMSource
    separator: str
    k: int
    temperature: float | None = None
    spread: bool = False


def serve(served: Served, host: str, port: int, token: str | None, limits: ServingLimits) -> None:
    """Serve until a signal. Raises UserError for an address that is taken, and what loading raised."""
    listener = _listen(host, port)
    server: uvicorn.Server

    def stop() -> None:
        server.should_exit = True

    app = create_app(lambda metrics: open_service(served, limits, metrics), limits, token, stop)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # it would hold what is asked for; metrics count requests
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=int(limits.timeout_seconds) + 1,
        )
    )
    name = f"[{host.strip('[]')}]" if ":" in host else host
    log.info(f"listening on http://{name}:{listener.getsockname()[1]}; loading")
    with listener, _ends_well():
        server.run([listener])
    if app.state.opened.error is not None:
        raise app.state.opened.error
    log.info("stopped; every request that was taken has been answered")


async def open_service(served: Served, limits: ServingLimits, metrics: Metrics) -> Service:
    """Load the LM and the index beside the event loop."""
    root, source = index_folder(served.directory), served.source

    def load() -> tuple:
        index = IndexHolder(lambda: open_served_index(root, served.temperature), lambda: state_of(root), metrics)
        # Local weights as they are: they mix and stream themselves.
        lm = source.load(served.spread) if isinstance(source, LocalSource) else source.open_here()
        most = min(limits.max_prompt_tokens, lm.max_tokens or limits.max_prompt_tokens)
        return lm, Prompting(served.separator, source.tokenizer(), most), served.k, index

    lm, prompting, k, index = await asyncio.wrap_future(in_background(load, "loading"))
    log.info(f"ready: {lm.identity}, index version {index.served.version}")
    return Service(lm, prompting, k, index, limits, metrics)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: {error.strerror}; expected an address of this machine that is free") from error
    return listener


@contextmanager
def _ends_well() -> Iterator[None]:
    """uvicorn raises the signals again that ended it, for whoever handled them before; here they mean a good end."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
