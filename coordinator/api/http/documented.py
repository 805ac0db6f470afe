"""What /openapi.json says of replies besides their bodies: the errors of each API, and that answers may stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class OpenAIProblem(BaseModel):
    """What went wrong. param: the field at fault, None where there is none."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """An error in the form of OpenAI's API."""

    error: OpenAIProblem


class AnthropicProblem(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """An error in the form of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicProblem


def _errors(form: type[BaseModel], *statuses: int) -> Responses:
    replies: Responses = {status: {"model": form, "description": HTTPStatus(status).phrase} for status in statuses}
    return {**replies, "default": {"model": form, "description": "Anything else that went wrong."}}


_STREAM: dict[str, Any] = {"text/event-stream": {}}
ANSWER: Responses = {200: {"description": "The whole reply, or its pieces with `stream`.", "content": _STREAM}}

_ASKING = (400, 401, 404, 413)
_ANSWERING = (*_ASKING, 429, 500, 503, 504)
OPENAI_ERRORS = _errors(OpenAIError, *_ANSWERING)
ANTHROPIC_ERRORS = _errors(AnthropicError, *_ANSWERING)
QUERY_ERRORS = _errors(OpenAIError, 401)
BODY_ERRORS = _errors(OpenAIError, *_ASKING)
NOT_READY: Responses = {503: {"description": "No request would be taken now."}}
EVENTS: Responses = {200: {"description": "Events, as long as they are read.", "content": _STREAM}}
METRICS: Responses = {200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}}
