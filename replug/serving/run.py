"""The server's process: it listens, loads, answers, and ends when it is told to.

SIGTERM and Ctrl-C end it well: it takes no more requests and answers those that it has, at most as long as a request
may take; a second Ctrl-C does not wait for them.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from replug.cluster.background import in_background
from replug.config.errors import UserError
from replug.index_workers.build_plan import index_folder
from replug.models.black_box_lm import BlackBoxLM
from replug.models.lm_source import LMSource
from replug.models.local.local_source import LocalSource
from replug.serving.app import create_app
from replug.serving.index_holder import IndexHolder, open_served_index, state_of
from replug.serving.limits import ServingLimits
from replug.serving.metrics import Metrics
from replug.serving.prompting import Prompting
from replug.serving.service import Ensembled, Service

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


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    token: str | None


def serve(served: Served, address: Address, limits: ServingLimits) -> None:
    """Until a signal. Raises UserError for an address that is taken, and what loading raised."""
    listener = _listen(address)
    server: uvicorn.Server

    def stop() -> None:
        server.should_exit = True

    app = create_app(lambda metrics: open_service(served, limits, metrics), limits, address.token, stop)
    server = uvicorn.Server(_settings(app, limits))
    log.info(f"listening on {_url(address.host, listener)}; loading")
    with listener, _ends_well():
        server.run([listener])
    if app.state.opened.error is not None:
        raise app.state.opened.error
    log.info("stopped; every request that was taken has been answered")


async def open_service(served: Served, limits: ServingLimits, metrics: Metrics) -> Service:
    """The LM and the index in memory, loaded beside the event loop."""
    ensemble, index = await asyncio.wrap_future(in_background(lambda: _open(served, limits, metrics), "loading"))
    log.info(f"ready: {ensemble.lm.identity}, index version {index.served.version}")
    return Service(ensemble, index, limits, metrics)


def _open(served: Served, limits: ServingLimits, metrics: Metrics) -> tuple[Ensembled, IndexHolder]:
    root = index_folder(served.directory)
    index = IndexHolder(lambda: open_served_index(root, served.temperature), lambda: state_of(root), metrics)
    lm = _open_lm(served)
    most = min(limits.max_prompt_tokens, lm.max_tokens or limits.max_prompt_tokens)
    return Ensembled(lm, Prompting(served.separator, served.source.tokenizer(), most), served.k), index


def _open_lm(served: Served) -> BlackBoxLM:
    """Local weights as they are: what mixes and streams is theirs."""
    source = served.source
    return source.load(served.spread) if isinstance(source, LocalSource) else source.open_here()


def _listen(address: Address) -> socket.socket:
    """Bound before anything is loaded."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host.strip("[]"), address.port))
    except OSError as error:
        listener.close()
        where = f"--host {address.host} --port {address.port}"
        raise UserError(f"{where}: {error.strerror}; expected an address of this machine that is free") from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def _settings(app: Callable, limits: ServingLimits) -> uvicorn.Config:
    """No access log: it would hold what is asked for. Metrics count requests."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(limits.timeout_seconds) + 1,
    )


@contextmanager
def _ends_well() -> Iterator[None]:
    """uvicorn raises the signals again that ended it, for whoever handled them before; here they mean a good end."""

    def heard(number: int, frame: FrameType | None) -> None:
        """The server ended by it."""

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
