"""How exceptions become HTTP errors: one table of statuses, and the error object of the API that a client speaks."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from coordinator.engine import context_overflow
from coordinator.engine.context_overflow import ContextOverflow
from services.errors import FlashsplitError, without_sockets

log = structlog.get_logger()

_STATUS: Mapping[str, tuple[int, str, str]] = {
    # gRPC code: HTTP status, OpenAI's type, Anthropic's type.
    "INVALID_ARGUMENT": (400, "invalid_request_error", "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error", "invalid_request_error"),
    "UNIMPLEMENTED": (400, "invalid_request_error", "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error", "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error", "permission_error"),
    "NOT_FOUND": (404, "not_found_error", "not_found_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "rate_limit_error"),
    "UNAVAILABLE": (503, "server_error", "overloaded_error"),
    "DEADLINE_EXCEEDED": (504, "server_error", "timeout_error"),
}
_CODES: Mapping[str, str] = {
    context_overflow.REASON: "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "QUEUE_FULL": "rate_limit_exceeded",
    "INVALID_API_KEY": "invalid_api_key",
}
_ANTHROPIC, _RESPONSES = "/v1/messages", "/v1/responses"
_NAMES: Mapping[str, Mapping[str, str]] = {
    # The shared code names fields as chat completions do; here, by path, what another API calls them.
    _RESPONSES: {
        "messages": "input",
        "max_tokens": "max_output_tokens",
    },
}

MAX_COMPLAINTS = 64
"""How many of pydantic's complaints of a body are looked at; one is told."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as an HTTP client gets it. code and param are those of OpenAI's error object."""

    status: int
    message: str
    openai_type: str
    anthropic_type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    messages: Mapping[str, str] = field(default_factory=dict)
    """What clients of another API are told instead of the message, by its path."""

    @property
    def headers(self) -> dict[str, str]:
        """The reply's headers that belong to the error."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def openai(self) -> dict[str, Any]:
        """Return the body in the form of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.openai_type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the body in the form of Anthropic's API."""
        return {
            "type": "error",
            "error": {"type": self.anthropic_type, "message": self.messages.get(_ANTHROPIC, self.message)},
        }

    def body(self, path: str) -> dict[str, Any]:
        """Return the body in the form of the API that a path belongs to."""
        if path.startswith(_ANTHROPIC):
            return self.anthropic()
        message, param = self.messages.get(path, self.message), _NAMES.get(path, {}).get(self.param or "", self.param)
        return replace(self, message=message, param=param).openai()


def speaks_anthropic(request: Request) -> bool:
    """Return whether a client expects replies in the form of Anthropic's API: by the path, or by a header of it where
    both APIs have a path in common."""
    path = request.url.path
    return path.startswith(_ANTHROPIC) or (path.startswith("/v1/models") and "anthropic-version" in request.headers)


def error_reply(request: Request, error: HttpError) -> JSONResponse:
    """Return an error as the client of a request expects it."""
    body = error.anthropic() if speaks_anthropic(request) else error.body(request.url.path)
    return JSONResponse(body, error.status, headers=error.headers)


class HttpRefusal(Exception):
    """A refusal of a kind that only HTTP has. error: what the client is told."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def to_http(error: BaseException) -> HttpError:
    """Return what a client is told of an exception; of an unexpected one it learns no details."""
    if isinstance(error, HttpRefusal):
        return error.error
    if not isinstance(error, FlashsplitError):
        return HttpError(500, "internal error: the log has the details", "server_error", "api_error")
    status, openai_type, anthropic_type = _STATUS.get(error.code_name, (500, "server_error", "api_error"))
    retry, overflow = error.where.get("retry_after_s"), {}
    if isinstance(error, ContextOverflow):
        overflow = {_ANTHROPIC: error.anthropic_message, _RESPONSES: error.responses_message}
    return HttpError(
        status,
        # A library's words may go on behind the first line: those are for operators.
        without_sockets(error.message.partition("\n")[0]),
        openai_type,
        anthropic_type,
        code=_CODES.get(error.reason),
        param=error.where.get("field"),
        retry_after_s=int(retry) if retry is not None else (5 if status == 503 else None),
        messages=overflow,
    )


def logged(error: BaseException, event: str, path: str) -> HttpError:
    """Return what a client is told of an exception. What an operator has to know of it goes to the log as this event:
    all of an unexpected one, of a failed or missing worker what is said of it."""
    known = to_http(error)
    if known.status == 500:
        log.error(event, path=path, exc_info=error)
    elif known.status > 500:
        log.warning(event, path=path, why=str(error))
    return known


def invalid_body(error: RequestValidationError) -> HttpError:
    """Return a refusal that names the first field that pydantic complains of, its value and what would be accepted."""
    complaints = [(_field(complaint, error.body), complaint) for complaint in error.errors()[:MAX_COMPLAINTS]]
    # A field that may have several types gets a complaint for each. The one that got furthest was meant.
    first = [(field, complaint) for field, complaint in complaints if field[:1] == complaints[0][0][:1]]
    furthest, chosen = max(first, key=lambda pair: len(pair[0]))
    reasons = dict.fromkeys(complaint["msg"] for field, complaint in first if field == furthest)
    path = ".".join(furthest)
    # Of a field that is missing pydantic gives what it should stand in, which tells nobody anything.
    given = "" if chosen["type"] == "missing" else f" (given {reprlib.repr(chosen.get('input'))[:80]})"
    return HttpError(
        400,
        f"{path or 'body'}: {'; '.join(reasons)}{given}",
        "invalid_request_error",
        "invalid_request_error",
        param=path or None,
    )


def _field(error: Mapping[str, Any], body: Any) -> list[str]:
    """Return where in the body an error is: pydantic's path without the names of the types that it tried."""
    _, *path = error["loc"]
    names, value = [], body
    for index, part in enumerate(path):
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside and not (isinstance(value, list) and part >= len(value)):
            value = value[part]
        elif not (error["type"] == "missing" and index == len(path) - 1):
            continue
        names.append(str(part))
    return names
