"""What may be asked, in OpenAI's names, how much of it, and how the server refuses the rest.

A key that is unknown, or asks for what an ensemble cannot do, is refused. Clients send keys at the value that means
nothing, such as n=1: these are taken, any other value is not. A key that is null is as one that is not there. Refusals
have OpenAI's error shape, so that its clients raise the right error of theirs.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from replug.config.plain_text import plain_line
from replug.models.generation import GenerationOptions

Side = Literal["query", "document"]
QUERY: Final = "query"
DOCUMENT: Final = "document"
LM_NAME, RETRIEVER_NAME = "replug", "retriever"  # values of `model`
DEFAULT_DOCUMENTS = 10  # of a search
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it; of a chat the server's most
MOST_STOPS, LONGEST_STOP = 16, 256
# Values of keys that ask for nothing. What else they may hold in OpenAI's API is what this server does not do.
ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
}


class ApiError(Exception):
    """A refusal: an HTTP status, a line for a person, the parameter that it is about, and a code for a program."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retries: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retries = status, message, param, code, retries

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_json(), self.status, headers={"Retry-After": "1"} if self.retries else {})


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """Make the error of a request that cannot be meant, or cannot be done; `message` says what is expected."""
    return ApiError(400, f"{param}: {message}", param, code)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of requests; what is beyond is refused by name.

    `max_texts` are inputs of an embedding, queries of a search, or prompts. `max_prompt_tokens` are of a prompt with a
    document and the answer, and at most what the LM holds. `max_batch` texts or prompts are computed in one call.
    """

    max_body_bytes: int = 1_000_000
    max_texts: int = 256
    max_documents: int = 100
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 512
    max_concurrency: int = 64
    max_batch: int = 16
    timeout_seconds: float = 300.0

    def require_texts(self, param: str, number: int) -> None:
        if not 0 < number <= self.max_texts:
            raise refused(param, f"{number} texts; expected 1 to {self.max_texts}")

    def require_documents(self, param: str, k: int, least: int = 1) -> None:
        if not least <= k <= self.max_documents:
            raise refused(param, f"{k} documents; expected {least} to {self.max_documents}")


def _texts(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise ValueError("expected a text or a list of texts; ids of tokens are of no tokenizer here (send text)")


Texts = Annotated[list[str], BeforeValidator(_texts)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[StopText], BeforeValidator(_texts), Field(max_length=MOST_STOPS)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for key, value in body.items():
            _require_whole_characters(key, value)
        return {key: value for key, value in body.items() if value is not None}


class EmbeddingRequest(_Asked):
    """`input_type` says which side of the retriever embeds; `truncate` takes texts longer than it reads, and cuts."""

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    input_type: Side | None = None
    truncate: bool = False


class SearchRequest(_Asked):
    """`query` is one text or several."""

    query: Texts
    k: int | None = None
    truncate: bool = False


class EnsembleOptions(_Asked):
    """REPLUG's own: how many documents, and what finds them where it is not the prompt."""

    k: int | None = None
    query: str | None = None


class StreamOptions(_Asked):
    include_usage: bool = False


class _Generating(_Asked):
    model: str
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Stops = []
    seed: int = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    replug: EnsembleOptions = EnsembleOptions()

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for key in [key for key in body if key in ASK_FOR_NOTHING and body[key] is not None]:
            if not _is_among(body[key], ASK_FOR_NOTHING[key]):
                values = " or ".join(map(repr, ASK_FOR_NOTHING[key]))
                raise refused(key, f"this server does {values} only; leave it out", "unsupported_parameter")
        return {key: value for key, value in body.items() if key not in ASK_FOR_NOTHING}

    def options(self, limits: ServingLimits, default_tokens: int) -> GenerationOptions:
        """Raises ApiError for what cannot be meant."""
        most = limits.max_new_tokens
        tokens = min(default_tokens, most) if self.max_tokens is None else self.max_tokens
        if not 1 <= tokens <= most:
            raise refused("max_tokens", f"{tokens} tokens; expected 1 to {most}")
        try:
            return GenerationOptions(tokens, self.stop or None, self.temperature, self.top_p, self.seed)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0]) from error


class CompletionRequest(_Generating):
    prompt: Texts


class TextPart(_Asked):
    type: Literal["text"]
    text: str


class Message(_Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Generating):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None  # the newer name of max_tokens

    @model_validator(mode="after")
    def _one_length(self) -> "ChatRequest":
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise refused("max_tokens", "max_completion_tokens is another number; expected one of the two")
            self.max_tokens = self.max_completion_tokens
        return self


def require_model(given: str, expected: str) -> None:
    if given != expected:
        raise ApiError(404, f"model: {given!r} is not served; expected {expected!r}", "model", "model_not_found")


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong."""
    first: dict[str, Any] = error.errors()[0]
    place = plain_line(".".join(str(part) for part in first["loc"] if part != "body"))[:200] or "body"
    if first["type"] == "extra_forbidden":
        return refused(place, "unknown, or not done by this server; leave it out", "unsupported_parameter")
    return refused(place, plain_line(first["msg"].removeprefix("Value error, ")))


def _require_whole_characters(key: str, value: object) -> None:
    """JSON can hold halves of characters, which no tokenizer reads."""
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused(plain_line(key), "holds half a character (a lone surrogate); expected whole ones") from error


def _is_among(value: object, values: tuple[Any, ...]) -> bool:
    """Of the same type, since True is 1; whole numbers and others are one type."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
