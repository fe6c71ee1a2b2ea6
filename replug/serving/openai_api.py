"""Requests and responses in OpenAI's shapes; documents, weights and the index version are under `replug`.

Unknown keys are refused, and so are values that an ensemble cannot fulfil, such as n=2. Null means absent.
Refusals have OpenAI's error shape, so that its clients raise their own errors.
"""

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from replug.config.plain_text import plain_line
from replug.models.ensemble import Retrieved
from replug.models.generation import Generated, GenerationOptions

Json = dict[str, Any]
Side = Literal["query", "document"]
QUERY: Final = "query"
DOCUMENT: Final = "document"
LM_NAME, RETRIEVER_NAME = "replug", "retriever"  # values of `model`
MAX_TEXTS, MAX_DOCUMENTS = 2048, 100  # of one request; OpenAI's own limit of inputs
DEFAULT_TOKENS = 16  # of a completion, as at OpenAI; chats default to the server's limit


class ApiError(Exception):
    """A refusal: an HTTP status, a message, the parameter concerned, and a code for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def as_json(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_json(), self.status)


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """Make the error of an invalid or unsupported request; `message` names the expected value."""
    return ApiError(400, f"{param}: {message}", param, code)


def validation_refused(error: RequestValidationError) -> ApiError:
    """Make the error of the first invalid key, with pydantic's message."""
    first: Json = error.errors()[0]
    place = plain_line(".".join(str(part) for part in first["loc"] if part != "body"))[:200] or "body"
    if first["type"] == "extra_forbidden":
        return refused(place, "unknown, or not supported by this server; leave it out", "unsupported_parameter")
    return refused(place, plain_line(first["msg"].removeprefix("Value error, ")))


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits that a user sets; `max_prompt_tokens` counts a prompt with a document and the answer."""

    max_prompt_tokens: int = 4096
    max_new_tokens: int = 512
    max_batch: int = 16
    timeout_seconds: float = 300.0


# Requests ------------------------------------------------------------------------------------------------------------

AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Texts = Annotated[list[str], AS_LIST, Field(min_length=1, max_length=MAX_TEXTS)]
Zero = Annotated[float, Field(ge=0, le=0)]


class StrictRequest(BaseModel):
    """A request that refuses other keys and other types."""

    # Pydantic reads every character of a bounded text only, and so refuses half characters, which no tokenizer reads.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


class EmbeddingRequest(StrictRequest):
    """Texts to embed; `input_type` chooses the side of the retriever."""

    model: Literal["retriever"]
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    input_type: Side | None = None


class SearchRequest(StrictRequest):
    query: Texts
    k: int = Field(default=10, ge=1, le=MAX_DOCUMENTS)


class EnsembleOptions(StrictRequest):
    """REPLUG's own options: the number of documents, and a query to use instead of the prompt."""

    k: int | None = Field(default=None, ge=0, le=MAX_DOCUMENTS)
    query: str | None = None


class StreamOptions(StrictRequest):
    include_usage: bool = False


class _Generation(StrictRequest):
    model: Literal["replug"]
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Annotated[list[str], AS_LIST, Field(max_length=16)] | None = None
    seed: int = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    replug: EnsembleOptions = EnsembleOptions()
    # What clients send by default, with the only values that an ensemble has.
    n: Literal[1] = 1
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    user: str = ""

    def options(self, limits: ServingLimits, default_tokens: int) -> GenerationOptions:
        """Return how to decode the answer. Raises ApiError for values out of range."""
        most = limits.max_new_tokens
        tokens = min(default_tokens, most) if self.max_tokens is None else self.max_tokens
        if not 1 <= tokens <= most:
            raise refused("max_tokens", f"{tokens} tokens; expected 1 to {most}")
        try:
            return GenerationOptions(tokens, self.stop, self.temperature, self.top_p, self.seed)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0]) from error


class CompletionRequest(_Generation):
    prompt: Texts


class TextPart(StrictRequest):
    type: Literal["text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(StrictRequest):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(_Generation):
    messages: list[Message] = Field(min_length=1, max_length=MAX_TEXTS)
    max_completion_tokens: int | None = None  # the newer name of max_tokens

    @model_validator(mode="after")
    def _one_length(self) -> "ChatRequest":
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


# Responses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the ensemble; `evidence` becomes `replug` in the response."""

    generated: Generated
    finish_reason: Literal["length", "stop"]  # whether max_tokens ended it
    evidence: Json


def document_json(document: Retrieved) -> Json:
    return {"id": document.id, "text": document.text, "source": document.source, "score": document.similarity}


def embeddings_json(rows: Sequence[tuple[np.ndarray, int, bool]], as_base64: bool, version: int) -> Json:
    """Return the response for vectors [D] with their tokens and whether their texts were cut.

    base64 holds little-endian float32, as OpenAI's clients read it.
    """
    vectors, counts, are_cut = zip(*rows, strict=True)
    shown = [base64.b64encode(one.astype("<f4").tobytes()).decode() if as_base64 else one.tolist() for one in vectors]
    return {
        "object": "list",
        "model": RETRIEVER_NAME,
        "data": [{"object": "embedding", "index": number, "embedding": row} for number, row in enumerate(shown)],
        "usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)},
        "replug": {"index_version": version, "are_cut": are_cut},
    }


def models_json(lm: str, retriever: str, version: int) -> Json:
    """Return the list of both models; their identities are under `replug`."""
    served = {LM_NAME: {"lm": lm, "retriever": retriever}, RETRIEVER_NAME: {"retriever": retriever}}
    constant = {"object": "model", "created": 0, "owned_by": "replug"}
    rows = [{"id": name, "replug": own | {"index_version": version}} | constant for name, own in served.items()]
    return {"object": "list", "data": rows}


class AnswerShape:
    """Shape the responses to one completion or chat request; all parts carry one id and time."""

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat
        identifier = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": identifier, "created": int(time.time()), "model": LM_NAME}

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return one choice for each prompt; `replug` is one object, or a list for several prompts."""
        choices = []
        for number, answer in enumerate(answers):
            text = answer.generated.text
            content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            choices.append({"index": number, **content, "logprobs": None, "finish_reason": answer.finish_reason})
        evidence = [answer.evidence for answer in answers]
        own = {"usage": _usage(answers), "replug": evidence[0] if len(evidence) == 1 else evidence}
        return {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": choices,
        } | own

    def first(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""} if self._is_chat else "")

    def piece(self, text: str) -> Json:
        return self._chunk({"content": text} if self._is_chat else text)

    def last(self, answer: Answer) -> Json:
        return self._chunk({} if self._is_chat else "", answer.finish_reason) | {"replug": answer.evidence}

    def usage(self, answer: Answer) -> Json:
        return self._chunk("") | {"choices": [], "usage": _usage([answer])}

    def _chunk(self, content: Any, finish_reason: str | None = None) -> Json:
        name, key = ("chat.completion.chunk", "delta") if self._is_chat else ("text_completion", "text")
        choice = {"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": name, "choices": [choice]}


def _usage(answers: Sequence[Answer]) -> Json | None:
    """Count the tokens of all documents' prompts as the LM read them; None if it does not report them."""
    read = [answer.generated.prompt_tokens for answer in answers]
    if None in read:
        return None
    prompt, made = sum(count or 0 for count in read), sum(answer.generated.num_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
