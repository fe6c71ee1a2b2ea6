"""The HTTP server: routes, refusals, streams, and the process.

Everything is loaded before the server listens. On SIGTERM and Ctrl-C it answers its requests, for at most the time
limit of a request, and ends; a second Ctrl-C does not wait.
"""

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from replug.config.errors import RunError, UserError
from replug.models.black_box_lm import UnscorableText
from replug.models.http.http_lm import HttpLM, require_greedy
from replug.serving.access import GONE, HEALTH, BoundedConnection, Guard
from replug.serving.openai_api import (
    DEFAULT_TOKENS,
    Answer,
    AnswerShape,
    ApiError,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Json,
    SearchRequest,
    document_json,
    embeddings_json,
    models_json,
    refused,
    validation_refused,
)
from replug.serving.service import MOST_DOCUMENTS, Build, Question, Service, build_chat

log = logging.getLogger(__name__)
Result = TypeVar("Result")


# Routes --------------------------------------------------------------------------------------------------------------


def create_app(service: Service, token: str | None) -> FastAPI:
    """Make the app around a loaded service."""

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return api_error(error).response()

    app = FastAPI(
        exception_handlers=dict.fromkeys(
            (ApiError, RequestValidationError, HTTPException, RunError, Exception), refuse
        ),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(Guard, token=token, timeout_seconds=service.limits.timeout_seconds)
    _add_routes(app, service)
    return app


def api_error(error: Exception) -> ApiError:
    """Return the error for the client. Unreadable text is the client's mistake; other causes appear only in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return validation_refused(error)
    if isinstance(error, UnscorableText):
        return ApiError(400, str(error), code="unreadable_text")
    if isinstance(error, RunError):
        log.warning(f"an answer failed: {error}")
    return ApiError(500, "the server cannot answer; its log says why", code="internal_error")


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.get(HEALTH)
    async def health() -> Json:
        """Return the index version in use."""
        return {"status": "ready", "index_version": service.index.version}

    @app.get("/v1/models")
    async def models() -> Json:
        """List the LM with its documents and the retriever."""
        index = service.index
        return models_json(service.lm.identity, index.retriever.identity, index.version)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> JSONResponse:
        """Return the retriever's vector of each text."""
        index = service.index
        side = index.require_side(body.input_type)
        rows = await _within(service, request, service.embed(side, body.input))
        return JSONResponse(embeddings_json(rows, body.encoding_format == "base64", index.version))

    @app.post("/search")
    async def search(request: Request, body: SearchRequest) -> JSONResponse:
        """Return the documents most similar to each query."""
        results = await _within(service, request, service.search(body.k, body.query))
        rows = [
            {"index": number, "query_is_cut": is_cut, "documents": [document_json(one) for one in documents]}
            for number, (documents, is_cut) in enumerate(results)
        ]
        return JSONResponse({"object": "list", "index_version": service.index.version, "data": rows})

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Answer each prompt."""
        if len(body.prompt) > 1 and (body.stream or body.replug.query is not None):
            raise refused("prompt", f"{len(body.prompt)} prompts; expected one with stream or replug.query")
        whole = service.template.whole
        questions = [_question(service, body, partial(whole, context=one), one, DEFAULT_TOKENS) for one in body.prompt]
        return await _answer(service, request, questions, AnswerShape(is_chat=False), body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer from documents that are retrieved for the user's last message."""
        build = build_chat(service.template, service.chats, body.messages)
        question = _question(service, body, build, body.messages[-1].text, service.limits.max_new_tokens)
        return await _answer(service, request, [question], AnswerShape(is_chat=True), body)


def _question(
    service: Service, body: CompletionRequest | ChatRequest, build: Build, text: str, default_tokens: int
) -> Question:
    """Return the question of a request. Refuse options that this LM lacks before a stream begins."""
    options = body.options(service.limits, default_tokens)
    if isinstance(service.lm, HttpLM):
        try:
            require_greedy(options)
        except UserError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0], "unsupported_parameter") from error
    k, query = service.k if body.replug.k is None else body.replug.k, body.replug.query
    if k > max(MOST_DOCUMENTS, service.k):
        raise refused("replug.k", f"{k} documents; expected {max(MOST_DOCUMENTS, service.k)} at most (--k)")
    return Question(build, text if query is None else query, k, options)


# Answers -------------------------------------------------------------------------------------------------------------


async def _answer(
    service: Service,
    request: Request,
    questions: Sequence[Question],
    shape: AnswerShape,
    body: CompletionRequest | ChatRequest,
) -> Response:
    """Answer whole, or in a stream after all checks that may refuse the request."""
    if not body.stream:
        content = shape.whole(await _within(service, request, _answers(service, questions)))
        return JSONResponse(content)
    await _within(service, request, service.retrieve(questions[0]))
    events = _events(service, questions[0], shape, body.stream_options.include_usage)
    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _answers(service: Service, questions: Sequence[Question]) -> list[Answer]:
    """Answer all questions: one call for the searches, one for the answers."""
    await _all(service.retrieve(question) for question in questions)
    return await _all(service.answer(question) for question in questions)


async def _all(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines at once and return their results. Raises the first error and cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _within(service: Service, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work. Cancel it when time runs out or the client disconnects."""
    task = asyncio.create_task(_timed(service, work))
    disconnected = asyncio.ensure_future(request.receive())  # the body has been read, so this is the disconnect
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE, "the client disconnected")
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


async def _timed(service: Service, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work. Raises ApiError after the time limit of a request."""
    seconds = service.limits.timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise ApiError(504, f"the answer took longer than {seconds:g} s (--timeout)", code="timeout") from None


async def _events(service: Service, question: Question, shape: AnswerShape, has_usage: bool) -> AsyncIterator[bytes]:
    """Yield server-sent events as the answer grows. Closing the generator ends the answer.

    An error is an event too, since the status has been sent.
    """
    yield _event(shape.first())
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()
    question.listen = lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece)  # type: ignore[assignment]
    answering = asyncio.create_task(_timed(service, service.answer(question)))
    answering.add_done_callback(lambda done: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield _event(shape.piece(piece))
        yield _event(shape.last(answering.result()))
        if has_usage:
            yield _event(shape.usage(answering.result()))
        yield _event("[DONE]")
    except (ApiError, RunError) as error:
        yield _event(api_error(error).as_json())
    finally:
        answering.cancel()


def _event(content: Json | str) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


# The process ---------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Bind an address before anything is loaded. Raises UserError if it is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        message = f"--host {host} --port {port}: {error.strerror}; expected a free address of this machine"
        raise UserError(message) from error
    return listener


MAX_CONNECTIONS = 512  # of the 1,024 descriptors that a process may usually open; others get status 503


def run_server(app: FastAPI, listener: socket.socket, service: Service) -> None:
    """Serve until a signal ends the server; its requests are answered first."""
    listener.listen()  # connections wait until uvicorn accepts
    host, port = listener.getsockname()[:2]
    log.info(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
    # uvicorn raises its signal again for the earlier handler; here the end is a success.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # it would record users' requests
        server_header=False,
        http=BoundedConnection,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(service.limits.timeout_seconds) + 1,
    )
    uvicorn.Server(config).run([listener])
    log.info("stopped; all accepted requests have been answered")
