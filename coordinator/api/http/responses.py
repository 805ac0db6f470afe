"""/v1/responses: OpenAI's Responses API. Between requests only answers are kept that may be asked for again."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.answer import Answer, Piece
from coordinator.api.engine_requests import check_model
from coordinator.api.http.chat_exchange import ChatExchange, ExchangeReply, Talk, prepare_exchange
from coordinator.api.http.documented import ANSWER, OPENAI_ERRORS
from coordinator.api.http.errors import HttpError, logged, to_http
from coordinator.api.http.field_decisions import Api, refuse_fields
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.kept_answer import KeptAnswer, Place
from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.replies import SentEvent, json_reply
from coordinator.api.http.reply_form import Parts, answer_of
from coordinator.api.http.replying import asked_of, check_last, kept_for, kept_stream, reply
from coordinator.api.http.response_input import ResponsesRequest, answer_format, make_messages, tool_use
from coordinator.api.http.response_items import OutputItems, StreamedEvent
from coordinator.api.http.thinking import effort_variables
from coordinator.api.http.usage import timings_of
from coordinator.engine.engine import Engine
from services.errors import Cancelled, InvalidArgument, NotFound
from services.text_threads import on_text_thread


def routes(engine: Engine, answers: KeptAnswers) -> APIRouter:
    """Return the routes of this API."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute, responses=OPENAI_ERRORS)

    @router.post("/v1/responses", response_model=None, responses=ANSWER)
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        """A conversation, answered by the model; `stream` gives named server-sent events."""
        check_model(engine, body.model)
        refuse_fields(Api.RESPONSES, body)

        async def form() -> ResponseReply:
            exchange = await prepare_exchange(
                engine,
                body,
                await on_text_thread(len(body.input), _talk, engine, body),
                max_tokens=body.max_output_tokens,
                answer_format=answer_format(body),
                format_field="text.format",
            )
            return ResponseReply(exchange, _head(engine, body, exchange))

        if not body.background:
            return await reply(http, answers, form, stream=body.stream)
        _check_background(answers, body)
        asked = asked_of(http)
        kept = await kept_for(http, answers, asked, form, background=True)
        if body.stream:
            return await kept_stream(http, engine, kept, asked.last)
        return await json_reply(await _as_it_is(engine, kept))

    @router.get("/v1/responses/{response_id}", response_model=None, responses=ANSWER)
    async def response(response_id: str, http: HttpRequest, stream: bool = False, starting_after: int = -1) -> Response:
        """A response that is kept, as it is now; `stream` gives its events, those behind number `starting_after`."""
        kept, asked = _kept(answers, http, response_id), asked_of(http)
        if not stream:
            return await json_reply(await _as_it_is(engine, kept))
        if asked.last is not None:
            check_last(kept, asked.last)
        return await kept_stream(http, engine, kept, asked.last, lambda event: _number(event) <= starting_after)

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, http: HttpRequest) -> Response:
        """End a response that is computed in the background; one that is complete stays as it is."""
        kept = _kept(answers, http, response_id)
        if not kept.header.background:
            raise InvalidArgument(
                f"response {response_id!r} is not computed in the background: to end it, close its connection",
                field="response_id",
            )
        await kept.cancel()
        return await json_reply(await _as_it_is(engine, kept))

    @router.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str, http: HttpRequest) -> Response:
        """Forget a response, and end it where it goes on."""
        await answers.remove(_kept(answers, http, response_id))
        return await json_reply({"id": response_id, "object": "response", "deleted": True})

    return router


def _check_background(answers: KeptAnswers, body: ResponsesRequest) -> None:
    """Raises InvalidArgument where a response cannot be kept until it is fetched."""
    if answers.journal is None:
        raise InvalidArgument(
            "background is true, and this server keeps no answers on disk: start it with --journal DIR, or leave "
            "it out and use stream",
            field="background",
        )
    if (body.model_extra or {}).get("store") is False:
        raise InvalidArgument(
            "background is true and store is false: what is to be fetched later must be kept; leave store out",
            field="store",
        )


def _kept(answers: KeptAnswers, http: HttpRequest, response_id: str) -> KeptAnswer:
    """Return the response of this id. Raises NotFound for one that is not kept, or another client's."""
    kept = answers.of_name(asked_of(http).owner, response_id)
    if kept is None or not isinstance(kept.form, ResponseReply):
        raise NotFound(
            f"response {response_id[:80]!r} is not kept here: those with background: true are, for the time "
            "of --keep-answers",
            field="response_id",
        )
    return kept


def _number(event: SentEvent) -> int:
    """Return the number of one of this API's events."""
    assert isinstance(event, tuple)
    return int(event[1]["sequence_number"])


async def _as_it_is(engine: Engine, kept: KeptAnswer) -> dict[str, Any]:
    """Return a kept response as far as it has come."""
    form = kept.form
    assert isinstance(form, ResponseReply)
    if kept.is_whole:
        return await form.whole(engine, kept.read(Place()))
    items, parser = OutputItems(form.exchange.request.unique_id), form.exchange.parser()
    for part in kept.parts:
        if isinstance(part.content, Piece):
            for event in parser.push(part.content.text):
                items.add(event)
    if not kept.stopped:
        return {**form.head, "status": "in_progress" if kept.begun else "queued", "output": items.done}
    for event in parser.finish(cut=True):
        items.add(event)
    items.finish("incomplete")
    error = None if kept.error is None else _problem(to_http(kept.error))
    return {**form.head, "status": "failed" if error else "cancelled", "output": items.done, "error": error}


def _problem(error: HttpError) -> dict[str, Any]:
    """Return an error as a response tells it."""
    return {"code": error.code or "server_error", "message": error.message}


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
    request, background = exchange.request, body.background
    return {
        # Clients may send the same x-request-id twice; what is to be fetched later has an id of its own.
        "id": f"resp_{request.unique_id if background else request.request_id}",
        "object": "response",
        "background": background,
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
        "store": background,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in body.tools or []],
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "usage": None,
    }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _finished(
    engine: Engine, head: dict[str, Any], items: OutputItems, answer: Answer, ended_at: float
) -> dict[str, Any]:
    status, stats, tokenizer = _status(answer), answer.stats, engine.files.tokenizer
    thought = items.reasoning
    # It is not recorded which tokens were thinking, so its text is tokenised again and counted.
    thinking = len(tokenizer.encode(thought, add_special_tokens=False)) if thought and tokenizer is not None else 0
    return {
        **head,
        "status": status,
        "completed_at": int(ended_at) if status == "completed" else None,
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


@dataclass(frozen=True, slots=True)
class ResponseReply(ExchangeReply):
    """How an answer is told as a response. head: the response before its answer."""

    async def whole(self, engine: Engine, parts: Parts) -> dict[str, Any]:
        """See `ReplyForm`."""
        answer, ended_at = await answer_of(parts)
        items = OutputItems(self.exchange.request.unique_id)
        for event in self.exchange.read(answer):
            items.add(event)
        items.finish(_status(answer))
        return _finished(engine, self.head, items, answer, ended_at)

    async def stream(self, engine: Engine, parts: Parts) -> AsyncGenerator[SentEvent]:
        """See `ReplyForm`."""
        number, head = -1, self.head

        def numbered(event: StreamedEvent) -> tuple[str, dict[str, Any]]:
            nonlocal number
            number += 1
            return event[0], {"type": event[0], "sequence_number": number, **event[1]}

        parser, items = self.exchange.parser(), OutputItems(self.exchange.request.unique_id)
        is_running = False
        try:
            if head["background"]:
                queued = {**head, "status": "queued"}
                yield numbered(("response.created", {"response": queued}))
                yield numbered(("response.queued", {"response": queued}))
            async for part in parts:
                if not is_running:
                    is_running = True
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
                    finished = _finished(engine, head, items, answer, part.came_at)
                    yield numbered((f"response.{_status(answer)}", {"response": finished}))
        except Exception as error:
            if number < 0:  # nothing was sent: it gets a status
                raise
            is_cancelled = isinstance(error, Cancelled)
            failed = (
                {"status": "cancelled"}
                if is_cancelled
                else {"status": "failed", "error": _problem(logged(error, "http.stream_failed", "/v1/responses"))}
            )
            # Of one that was cancelled there is no event of its own.
            kind = "response.incomplete" if is_cancelled else "response.failed"
            yield numbered((kind, {"response": {**head, **failed}}))
