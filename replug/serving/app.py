"""The routes, and from a request to the questions that the ensemble answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from replug.config.errors import RunError, UserError
from replug.models.generation import GenerationOptions
from replug.models.http.http_lm import HttpLM, require_greedy
from replug.serving import answers
from replug.serving.answers import AnswerForm, answered, error_of_lm, streamed, unexpected, within
from replug.serving.batching import Metrics
from replug.serving.guard import Guard
from replug.serving.requests import (
    DEFAULT_DOCUMENTS,
    DEFAULT_TOKENS,
    LM_NAME,
    QUERY,
    RETRIEVER_NAME,
    ApiError,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SearchRequest,
    ServingLimits,
    of_validation,
    refused,
    require_model,
)
from replug.serving.service import Build, Question, RetrieverInput, Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Open = Callable[[Metrics], Awaitable[Service]]


@dataclass(slots=True)
class Opened:
    """The service, once it is loaded, or why it cannot be."""

    service: Service | None = None
    error: Exception | None = None

    def ready(self) -> Service:
        if self.service is None:
            raise ApiError(503, "the LM and the index are being loaded; ask /health", code="loading", retries=True)
        return self.service


def create_app(open_service: Open, limits: ServingLimits, token: str | None, failed: Callable[[], None]) -> FastAPI:
    """Make the app. It answers /health while `open_service` loads, and calls `failed` where that raises an error.

    The error is at `app.state.opened.error`.
    """
    metrics, opened = Metrics(), Opened()

    async def load() -> None:
        try:
            opened.service = await open_service(metrics)
        except Exception as error:  # noqa: BLE001 - raised by who runs the server, when it has ended
            opened.error = error
            failed()

    @asynccontextmanager
    async def loaded(app: FastAPI) -> AsyncIterator[None]:
        """Load beside the server."""
        loading = asyncio.create_task(load())
        yield
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        if opened.service is not None:
            await opened.service.close()

    app = FastAPI(lifespan=loaded, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.opened = opened
    _add_refusals(app)
    _add_state(app, opened, metrics)
    _add_retrieval(app, opened, limits)
    _add_generation(app, opened, limits)
    app.add_middleware(Guard, token=token, limits=limits, metrics=metrics)
    return app


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
        return error_of_lm(error).response()

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
        dim = index.encoder(QUERY).dim
        if asked.dimensions not in (None, dim):
            message = f"{asked.dimensions}; expected {dim}, which the retriever has"
            raise refused("dimensions", message, "unsupported_parameter")
        if asked.input_type is None and index.is_asymmetric:
            raise refused("input_type", "this retriever embeds queries and documents apart; expected query or document")
        texts = RetrieverInput(asked.input, "input", asked.truncate)
        embedded = await within(limits, service.embed(index, asked.input_type or QUERY, texts))
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
        """Answer each prompt, all from one version of the index."""
        service = opened.ready()
        require_model(asked.model, LM_NAME)
        limits.require_texts("prompt", len(asked.prompt))
        if asked.stream and len(asked.prompt) > 1:
            raise refused("stream", f"{len(asked.prompt)} prompts; expected one that is streamed")
        if len(asked.prompt) > 1 and asked.replug.query is not None:
            raise refused("replug.query", f"one query for {len(asked.prompt)} prompts; expected one prompt")
        options, of_text = _options(asked, DEFAULT_TOKENS, service), service.prompting.of_text
        questions = [_question(asked, service, options, of_text(prompt), prompt) for prompt in asked.prompt]
        return await _answer(service, questions, AnswerForm(is_chat=False), asked)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest) -> Response:
        """Answer from documents that are found for the user's last message."""
        service = opened.ready()
        require_model(asked.model, LM_NAME)
        limits.require_texts("messages", len(asked.messages))
        options = _options(asked, limits.max_new_tokens, service)
        build = service.prompting.of_chat(asked.messages)
        questions = [_question(asked, service, options, build, asked.messages[-1].text)]
        return await _answer(service, questions, AnswerForm(is_chat=True), asked)


def _options(asked: CompletionRequest | ChatRequest, default_tokens: int, service: Service) -> GenerationOptions:
    """Return how the answer is decoded. What this LM cannot do is refused here, before a stream begins."""
    options = asked.options(service.limits, default_tokens)
    if isinstance(service.lm, HttpLM):
        try:
            require_greedy(options)
        except UserError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0], "unsupported_parameter") from error
    return options


def _question(
    asked: CompletionRequest | ChatRequest, service: Service, options: GenerationOptions, build: Build, text: str
) -> Question:
    k, query = asked.replug.k, asked.replug.query
    if k is not None:
        service.limits.require_documents("replug.k", k, least=0)
    return Question(
        build, text if query is None else query, service.k if k is None else k, options, service.index.served
    )


async def _answer(
    service: Service, questions: list[Question], form: AnswerForm, asked: CompletionRequest | ChatRequest
) -> Response:
    """Answer at once, or in a stream: what can be refused is refused before it begins, with a status of its own."""
    if not asked.stream:
        return JSONResponse(await within(service.limits, answered(service, questions, form)))
    await within(service.limits, service.find(questions[0]))
    events = streamed(service, questions[0], form, asked.stream_options.include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
