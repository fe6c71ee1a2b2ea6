"""Responses in OpenAI's shapes, whole or as events, with what is REPLUG's own under `replug`: documents and version."""

import asyncio
import base64
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from replug.config.errors import RunError
from replug.models.black_box_lm import UnscorableText
from replug.models.ensemble import Retrieved
from replug.serving.requests import LM_NAME, RETRIEVER_NAME, ApiError, EmbeddingRequest, ServingLimits
from replug.serving.service import Embedded, Question, Searched, Service

log = logging.getLogger(__name__)

Json = dict[str, Any]
Result = TypeVar("Result")


def embeddings(request: EmbeddingRequest, embedded: Embedded, version: int) -> Json:
    vectors, counts = embedded
    rows: list[Any] = [vector.tolist() for vector in vectors]
    if request.encoding_format == "base64":  # little-endian float32, as OpenAI's clients read it
        rows = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "model": request.model,
        "data": [{"object": "embedding", "index": number, "embedding": row} for number, row in enumerate(rows)],
        "usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)},
        "replug": {"index_version": version},
    }


def search_results(searched: Searched, version: int) -> Json:
    found, are_cut = searched
    return {
        "object": "list",
        "index_version": version,
        "data": [
            {"index": number, "query_is_cut": is_cut, "documents": [_document(one) for one in documents]}
            for number, (documents, is_cut) in enumerate(zip(found, are_cut, strict=True))
        ],
    }


def _document(found: Retrieved) -> Json:
    return {"id": found.id, "text": found.text, "source": found.source, "score": found.similarity}


def models(lm: str, retriever: str, version: int) -> Json:
    """Name both models that are served; what they are is under `replug`."""
    own = {LM_NAME: {"lm": lm, "retriever": retriever}, RETRIEVER_NAME: {"retriever": retriever}}
    rows = [{"id": name, "replug": of | {"index_version": version}} for name, of in own.items()]
    same = {"object": "model", "created": 0, "owned_by": "replug"}
    return {"object": "list", "data": [row | same for row in rows]}


class AnswerForm:
    """The responses to one request: a completion, or a chat. One `id` and time stand in all of its parts."""

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._name = "chat.completion" if is_chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}

    def whole(self, questions: Sequence[Question]) -> Json:
        """Give each prompt a choice; `replug` is the one's, or a list of all."""
        own = [_evidence(question) for question in questions]
        choices = [self._choice(number, question) for number, question in enumerate(questions)]
        return {
            **self._head,
            "object": self._name,
            "model": LM_NAME,
            "choices": choices,
            "usage": _usage(questions),
            "replug": own[0] if len(own) == 1 else own,
        }

    def _choice(self, number: int, question: Question) -> Json:
        text = question.answer.text
        said: Json = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {"index": number, **said, "logprobs": None, "finish_reason": _finish_reason(question)}

    def first(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""} if self._is_chat else "", None)

    def piece(self, text: str) -> Json:
        return self._chunk({"content": text} if self._is_chat else text, None)

    def last(self, question: Question) -> Json:
        return {**self._chunk({} if self._is_chat else "", _finish_reason(question)), "replug": _evidence(question)}

    def counts(self, question: Question) -> Json:
        """Return the chunk after the last, for a client that asks for it."""
        return {**self._chunk("", None), "choices": [], "usage": _usage([question])}

    def _chunk(self, said: Any, reason: str | None) -> Json:
        name = "chat.completion.chunk" if self._is_chat else self._name
        choice = {"index": 0, "delta" if self._is_chat else "text": said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": name, "model": LM_NAME, "choices": [choice]}


def _evidence(question: Question) -> Json:
    """Weights are the ensemble's, and sum to 1. `is_cut`: the LM did not read the document's end."""
    return {
        "index_version": question.index.version,
        "temperature": question.index.temperature,
        "query_is_cut": question.query_is_cut,
        "documents": [
            {**_document(found), "weight": weight, "is_cut": is_cut}
            for found, weight, is_cut in zip(question.documents, question.weights, question.are_cut, strict=True)
        ],
    }


def _finish_reason(question: Question) -> str:
    return "length" if question.answer.num_tokens >= question.options.max_new_tokens else "stop"


def _usage(questions: Sequence[Question]) -> Json | None:
    """Count the tokens of all documents' prompts, as the LM read them; None where it does not tell."""
    read = [question.answer.prompt_tokens for question in questions]
    if any(count is None for count in read):
        return None
    prompt, made = sum(count or 0 for count in read), sum(question.answer.num_tokens for question in questions)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


async def within(limits: ServingLimits, work: Awaitable[Result]) -> Result:
    """Wait for work within the time that a request may take. Raises ApiError when the time is over."""
    try:
        async with asyncio.timeout(limits.timeout_seconds):
            return await work
    except TimeoutError:
        seconds = limits.timeout_seconds
        raise ApiError(504, f"the answer took longer than {seconds:g} s (--timeout)", code="timeout") from None


def unexpected() -> ApiError:
    """What went wrong here is in the log, which its users need not read."""
    return ApiError(500, "the server cannot answer; its log says why", code="internal_error")


def error_of_lm(error: RunError) -> ApiError:
    """A text that the LM or the retriever cannot read is the client's mistake; all else is told to the log."""
    if isinstance(error, UnscorableText):
        return ApiError(400, str(error), code="unreadable_text")
    log.warning(f"an answer could not be given: {error}")
    return unexpected()


async def answered(service: Service, questions: Sequence[Question], form: AnswerForm) -> Json:
    """Answer all questions. The first that fails ends the others."""

    async def answer(question: Question) -> None:
        await service.find(question)
        await service.answer(question)

    tasks = [asyncio.create_task(answer(question)) for question in questions]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return form.whole(questions)


async def streamed(service: Service, question: Question, form: AnswerForm, has_usage: bool) -> AsyncIterator[bytes]:
    """Yield events as the answer grows. What goes wrong is an event too: the status was sent before."""
    yield _event(form.first())
    try:
        async with aclosing(_pieces(service, question)) as pieces:
            async for piece in pieces:
                yield _event(form.piece(piece))
        yield _event(form.last(question))
        if has_usage:
            yield _event(form.counts(question))
        yield _event("[DONE]")
    except ApiError as error:
        yield _event(error.as_json())
    except RunError as error:
        yield _event(error_of_lm(error).as_json())


def _event(content: Json | str) -> bytes:
    """Write a server-sent event."""
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


async def _pieces(service: Service, question: Question) -> AsyncGenerator[str, None]:
    """Yield pieces as the LM's thread tells them. Closing it ends the answer."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def listen(piece: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, piece)

    question.listen = listen
    answering = asyncio.create_task(within(service.limits, service.answer(question)))
    answering.add_done_callback(lambda done: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        answering.result()
    finally:
        answering.cancel()
