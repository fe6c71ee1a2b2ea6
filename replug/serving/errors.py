"""What a request may be refused for, in OpenAI's error shape, so that its clients raise the right error of theirs."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

RETRY_AFTER_SECONDS = 1
OF_REQUEST, OF_SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """A refusal: an HTTP status, a line for a person, the parameter that it is about, and a code for a program."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retries: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER_SECONDS)} if retries else {}

    def as_json(self) -> dict[str, Any]:
        kind = OF_REQUEST if self.status < 500 else OF_SERVER
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_json(), self.status, headers=dict(self.headers))


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A request that cannot be meant, or cannot be done; `message` says what is expected."""
    return ApiError(400, f"{param}: {message}", param, code)


def not_ready() -> ApiError:
    return ApiError(503, "the LM and the index are being loaded; ask /health", code="loading", retries=True)


def overloaded(at_most: int) -> ApiError:
    return ApiError(503, f"{at_most} requests are under way already; ask again", code="overloaded", retries=True)


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the answer took longer than {seconds:g} s (--timeout)", code="timeout")


def unexpected() -> ApiError:
    """What went wrong here is in the log, which its users need not read."""
    return ApiError(500, "the server cannot answer; its log says why", code="internal_error")
