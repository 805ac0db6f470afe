"""/v1/responses: OpenAI's Responses API. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coordinator.answer import Answer
from coordinator.api.engine_requests import check_model
from coordinator.api.http.chat_exchange import ChatExchange, Talk, answer_exchange, prepare_exchange
from coordinator.api.http.documented import ANSWER, OPENAI_ERRORS
from coordinator.api.http.errors import logged
from coordinator.api.http.field_decisions import Api, refuse_fields
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.replies import event_stream, unless_gone
from coordinator.api.http.response_input import ResponsesRequest, answer_format, make_messages, tool_use
from coordinator.api.http.response_items import OutputItems, StreamedEvent
from coordinator.api.http.thinking import effort_variables
from coordinator.api.http.usage import timings_of
from coordinator.engine.engine import Engine
from services.text_threads import on_text_thread


def routes(engine: Engine) -> APIRouter:
    """Return the routes of this API."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute, responses=OPENAI_ERRORS)

    @router.post("/v1/responses", response_model=None, responses=ANSWER)
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        """A conversation, answered by the model; `stream` gives named server-sent events."""
        check_model(engine, body.model)
        refuse_fields(Api.RESPONSES, body)
        exchange = await unless_gone(
            http,
            prepare_exchange(
                engine,
                body,
                await on_text_thread(len(body.input), _talk, engine, body),
                max_tokens=body.max_output_tokens,
                answer_format=answer_format(body),
                format_field="text.format",
            ),
        )
        head = _head(engine, body, exchange)
        if body.stream:
            return await event_stream(http, _stream(engine, exchange, head))
        return JSONResponse(await unless_gone(http, _whole(engine, exchange, head)))

    return router


def _talk(engine: Engine, body: ResponsesRequest) -> Talk:
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = effort_variables(engine.files.chat_template, effort, "reasoning.effort")
    if body.text is not None and body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
    return Talk(make_messages(body), tool_use(body), {**variables, **(body.chat_template_kwargs or {})})


def _head(engine: Engine, body: ResponsesRequest, exchange: ChatExchange) -> dict[str, Any]:
    """Return the reply as it is before the answer: who answers, and what was asked for."""
    sampling = exchange.request.sampling
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    return {
        "id": f"resp_{exchange.request.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model or engine.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in body.tools or []],
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "usage": None,
    }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _finished(engine: Engine, head: dict[str, Any], items: OutputItems, answer: Answer) -> dict[str, Any]:
    status, stats, tokenizer = _status(answer), answer.stats, engine.files.tokenizer
    thought = items.reasoning
    # It is not recorded which tokens were thinking, so its text is tokenised again and counted.
    thinking = len(tokenizer.encode(thought, add_special_tokens=False)) if thought and tokenizer is not None else 0
    return {
        **head,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items.done,
        "usage": {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thinking, stats.completion_tokens)},
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        },
        "timings": timings_of(answer),
    }


async def _whole(engine: Engine, exchange: ChatExchange, head: dict[str, Any]) -> dict[str, Any]:
    answer = None
    async for part in answer_exchange(engine, exchange):
        if isinstance(part.content, Answer):
            answer = part.content
    assert answer is not None
    items = OutputItems(exchange.request.unique_id)
    for event in exchange.read(answer):
        items.add(event)
    items.finish(_status(answer))
    return _finished(engine, head, items, answer)


async def _stream(
    engine: Engine, exchange: ChatExchange, head: dict[str, Any]
) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    number = -1

    def numbered(event: StreamedEvent) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return event[0], {"type": event[0], "sequence_number": number, **event[1]}

    parser, items = exchange.parser(), OutputItems(exchange.request.unique_id)
    try:
        async for part in answer_exchange(engine, exchange):
            if number < 0:
                yield numbered(("response.created", {"response": head}))
                yield numbered(("response.in_progress", {"response": head}))
            answer = part.content if isinstance(part.content, Answer) else None
            text = "" if isinstance(part.content, Answer) else part.content.text
            for event in parser.push(text) if answer is None else parser.finish(cut=answer.cut):
                for streamed in items.add(event):
                    yield numbered(streamed)
            if answer is not None:
                for streamed in items.finish(_status(answer)):
                    yield numbered(streamed)
                yield numbered((f"response.{_status(answer)}", {"response": _finished(engine, head, items, answer)}))
    except Exception as error:
        if number < 0:  # nothing was sent: it gets a status
            raise
        known = logged(error, "http.stream_failed", "/v1/responses")
        failed = {"code": known.code or "server_error", "message": known.message}
        yield numbered(("response.failed", {"response": {**head, "status": "failed", "error": failed}}))
