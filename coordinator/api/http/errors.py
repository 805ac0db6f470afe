"""The one table from exceptions to what HTTP clients expect: a status, and the error object of the API they speak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi.exceptions import RequestValidationError

from services.errors import FlashsplitError

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
    "CONTEXT_OVERFLOW": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "QUEUE_FULL": "rate_limit_exceeded",
    "INVALID_API_KEY": "invalid_api_key",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    # What all APIs share calls its fields as chat completions do. By path: what this one calls them.
    "/v1/responses": {
        "messages": "input",
        "max_tokens": "max_output_tokens",
    },
}


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error on its way out."""

    status: int
    message: str
    openai_type: str
    anthropic_type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.openai_type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.anthropic_type, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        """In the words of the API that a path belongs to."""
        if path.startswith("/v1/messages"):
            return self.anthropic()
        return replace(self, param=_NAMES.get(path, {}).get(self.param or "", self.param)).openai()


def to_http(error: BaseException) -> HttpError:
    """What a client is told; an unexpected exception keeps its details to itself."""
    if not isinstance(error, FlashsplitError):
        return HttpError(500, "internal error: the log has the details", "server_error", "api_error")
    status, openai_type, anthropic_type = _STATUS.get(error.code_name, (500, "server_error", "api_error"))
    retry = error.where.get("retry_after_s")
    return HttpError(
        status,
        # A library's words may go on behind the first line: those are for operators.
        error.message.partition("\n")[0],
        openai_type,
        anthropic_type,
        code=_CODES.get(error.reason),
        param=error.where.get("field"),
        retry_after_s=int(retry) if retry is not None else (5 if status == 503 else None),
    )


def invalid_body(error: RequestValidationError) -> HttpError:
    """Names the first field that pydantic complains of, what came and what would be accepted."""
    places = [(_field(one, error.body), one) for one in error.errors()]
    # Of a field that may have several types each complains. The one that got furthest was meant.
    first = [(field, one) for field, one in places if field[:1] == places[0][0][:1]]
    found, chosen = max(first, key=lambda place: len(place[0]))
    reasons = dict.fromkeys(one["msg"] for field, one in first if field == found)
    path = ".".join(found)
    return HttpError(
        400,
        f"{path or 'body'}: {'; '.join(reasons)} (given {repr(chosen.get('input'))[:80]})",
        "invalid_request_error",
        "invalid_request_error",
        param=path or None,
    )


def _field(error: Mapping[str, Any], body: Any) -> list[str]:
    """Where in the body it is: pydantic's path without the names of the types that it tried."""
    _, *path = error["loc"]
    found, value = [], body
    for index, part in enumerate(path):
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside and not (isinstance(value, list) and part >= len(value)):
            value = value[part]
        elif not (error["type"] == "missing" and index == len(path) - 1):
            continue
        found.append(str(part))
    return found
