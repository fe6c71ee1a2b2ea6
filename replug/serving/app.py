"""The routes, and what stands round them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from replug.config.errors import RunError
from replug.serving import answers
from replug.serving.asking import chat_question, completion_questions, side_of
from replug.serving.errors import ApiError, not_ready, unexpected
from replug.serving.guard import Guard
from replug.serving.limits import ServingLimits
from replug.serving.metrics import Metrics
from replug.serving.requests import (
    DEFAULT_DOCUMENTS,
    RETRIEVER_NAME,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SearchRequest,
    of_validation,
    require_model,
)
from replug.serving.service import Question, RetrieverInput, Service
from replug.serving.streams import answered, of_lm, streamed, within

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Open = Callable[[Metrics], Awaitable[Service]]


@dataclass(slots=True)
class Opened:
    """The service, once it is loaded, or why it cannot be."""

    service: Service | None = None
    error: Exception | None = None

    def ready(self) -> Service:
        if self.service is None:
            raise not_ready()
        return self.service


def create_app(open_service: Open, limits: ServingLimits, token: str | None, failed: Callable[[], None]) -> FastAPI:
    """The app. It answers /health while `open_service` loads; `failed` is called where it cannot.

    What it raised is at `app.state.opened.error`.
    """
    metrics, opened = Metrics(), Opened()
    app = FastAPI(
        lifespan=lambda app: _loaded(opened, open_service, metrics, failed),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.opened = opened
    _add_refusals(app)
    _add_state(app, opened, metrics)
    _add_retrieval(app, opened, limits)
    _add_generation(app, opened, limits)
    app.add_middleware(Guard, token=token, limits=limits, metrics=metrics)
    return app


@asynccontextmanager
async def _loaded(
    opened: Opened, open_service: Open, metrics: Metrics, failed: Callable[[], None]
) -> AsyncIterator[None]:
    """Loading begins with the server and goes on beside it."""
    loading = asyncio.create_task(_load(opened, open_service, metrics, failed))
    yield
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    if opened.service is not None:
        await opened.service.close()


async def _load(opened: Opened, open_service: Open, metrics: Metrics, failed: Callable[[], None]) -> None:
    try:
        opened.service = await open_service(metrics)
    except Exception as error:  # noqa: BLE001 - raised by who runs the server, when it has ended
        opened.error = error
        failed()


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    @app.exception_handler(RunError)
    async def refuse_answer(request: Request, error: RunError) -> Response:
        return of_lm(error).response()

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return unexpected().response()


def _add_state(app: FastAPI, opened: Opened, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        if opened.service is None:
            return JSONResponse({"status": "loading"}, 503)
        return JSONResponse({"status": "ready", "index_version": opened.service.index.served.version})

    @app.get("/metrics")
    async def numbers() -> Response:
        return Response(metrics.text(), media_type=PROMETHEUS)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        service = opened.ready()
        index = service.index.served
        return JSONResponse(answers.models(service.lm.identity, index.retriever.identity, index.version))


def _add_retrieval(app: FastAPI, opened: Opened, limits: ServingLimits) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(asked: EmbeddingRequest) -> JSONResponse:
        service = opened.ready()
        require_model(asked.model, RETRIEVER_NAME)
        limits.require_texts("input", len(asked.input))
        index = service.index.served
        side, texts = side_of(asked, index), RetrieverInput(asked.input, "input", asked.truncate)
        embedded = await within(limits, service.embed(index, side, texts))
        return JSONResponse(answers.embeddings(asked, embedded, index.version))

    @app.post("/search")
    async def search(asked: SearchRequest) -> JSONResponse:
        service = opened.ready()
        limits.require_texts("query", len(asked.query))
        k = min(DEFAULT_DOCUMENTS, limits.max_documents) if asked.k is None else asked.k
        limits.require_documents("k", k)
        index, queries = service.index.served, RetrieverInput(asked.query, "query", asked.truncate)
        searched = await within(limits, service.search(index, k, queries))
        return JSONResponse(answers.search_results(searched, index.version))


def _add_generation(app: FastAPI, opened: Opened, limits: ServingLimits) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(asked: CompletionRequest) -> Response:
        service = opened.ready()
        questions, form = completion_questions(asked, service), answers.AnswerForm(is_chat=False)
        if asked.stream:
            return await _stream(service, questions[0], form, asked.stream_options.include_usage)
        return JSONResponse(await within(limits, answered(service, questions, form)))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest) -> Response:
        service = opened.ready()
        question, form = chat_question(asked, service), answers.AnswerForm(is_chat=True)
        if asked.stream:
            return await _stream(service, question, form, asked.stream_options.include_usage)
        return JSONResponse(await within(limits, answered(service, [question], form)))


async def _stream(service: Service, question: Question, form: answers.AnswerForm, has_usage: bool) -> Response:
    """What can be refused is refused before the stream begins, with a status of its own."""
    evidence = await within(service.limits, service.find(question))
    events = streamed(service, question, evidence, form, has_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
