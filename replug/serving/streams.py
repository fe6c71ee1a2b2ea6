"""Answers of questions, at once or piece by piece, within the time that a request may take."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from replug.config.errors import RunError
from replug.models.black_box_lm import UnscorableText
from replug.serving.answers import AnswerForm, error_event, event
from replug.serving.errors import ApiError, timed_out, unexpected
from replug.serving.limits import ServingLimits
from replug.serving.service import AnswerEvidence, Question, ServedAnswer, Service

log = logging.getLogger(__name__)

Result = TypeVar("Result")


async def within(limits: ServingLimits, work: Awaitable[Result]) -> Result:
    """Raises ApiError when the time is over."""
    try:
        async with asyncio.timeout(limits.timeout_seconds):
            return await work
    except TimeoutError:
        raise timed_out(limits.timeout_seconds) from None


def of_lm(error: RunError) -> ApiError:
    """What an LM or a retriever raised: a text that it cannot read is the client's, all else is told to the log."""
    if isinstance(error, UnscorableText):
        return ApiError(400, str(error), code="unreadable_text")
    log.warning(f"an answer could not be given: {error}")
    return unexpected()


async def answered(service: Service, questions: Sequence[Question], form: AnswerForm) -> dict[str, Any]:
    """The response to all of them. The first that fails ends the others."""
    tasks = [asyncio.create_task(_answer(service, question)) for question in questions]
    try:
        evidence, found = zip(*await asyncio.gather(*tasks), strict=True)
    finally:
        for task in tasks:
            task.cancel()
    return form.whole(found, evidence, questions[0].options.max_new_tokens)


async def _answer(service: Service, question: Question) -> tuple[AnswerEvidence, ServedAnswer]:
    evidence = await service.find(question)
    return evidence, await service.answer(question, evidence)


async def streamed(
    service: Service, question: Question, evidence: AnswerEvidence, form: AnswerForm, has_usage: bool
) -> AsyncIterator[bytes]:
    """Events as the answer grows. What goes wrong is an event too: the status was sent before."""
    yield event(form.first())
    try:
        async with aclosing(_parts(service, question, evidence)) as parts:
            async for part in parts:
                if isinstance(part, str):
                    yield event(form.piece(part))
                    continue
                yield event(form.last(part, evidence, question.options.max_new_tokens))
                if has_usage:
                    yield event(form.counts(part))
                yield event("[DONE]")
    except ApiError as error:
        yield error_event(error)
    except RunError as error:
        yield error_event(of_lm(error))


async def _parts(
    service: Service, question: Question, evidence: AnswerEvidence
) -> AsyncGenerator[str | ServedAnswer, None]:
    """Pieces as the LM's thread tells them, and the whole answer last. Closing it ends the answer."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def listen(piece: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, piece)

    answering = asyncio.create_task(within(service.limits, service.answer(question, evidence, listen)))
    answering.add_done_callback(lambda done: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        yield answering.result()
    finally:
        answering.cancel()
