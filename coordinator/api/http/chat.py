"""/v1/chat/completions, streamed and whole."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coordinator.answer import Answer
from coordinator.api.http.conversation import Conversation, ToolUse, answers_to, converse
from coordinator.api.http.documented import ANSWER, OPENAI_ERRORS
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.logprobs import chat_logprobs
from coordinator.api.http.replies import event_stream, unless_gone
from coordinator.api.http.request_bodies import check_model
from coordinator.api.http.schemas import ChatRequest
from coordinator.api.http.usage import timings_of, usage_of
from coordinator.engine.engine import Engine
from coordinator.text.parsers.collected import collect
from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from services.errors import InvalidArgument


def routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute, responses=OPENAI_ERRORS)

    @router.post("/v1/chat/completions", response_model=None, responses=ANSWER)
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """A chat, answered by the model; `stream` gives server-sent events."""
        check_model(engine, body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
        talk = await unless_gone(
            http,
            converse(
                engine,
                body,
                body.messages,
                tool_use(body),
                max_tokens=body.max_completion_tokens or body.max_tokens,
                variables=body.chat_template_kwargs,
                answer_format=body.response_format,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            ),
        )
        head = {
            "id": f"chatcmpl-{talk.request.request_id}",
            "created": int(time.time()),
            "model": body.model or engine.name,
        }
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return await event_stream(http.url.path, _stream(engine, talk, body.n, head, usage=usage))
        return JSONResponse(await unless_gone(http, _whole(engine, talk, body.n, head)))

    return router


def tool_use(body: ChatRequest) -> ToolUse:
    """What `tools` and `tool_choice` mean together. Raises InvalidArgument for a choice of another form."""
    choice, tools = body.tool_choice, body.tools or []
    parallel = (body.model_extra or {}).get("parallel_tool_calls") is not False
    if choice is None or choice == "auto":
        return ToolUse(tools, parallel=parallel)
    if choice == "none":
        return ToolUse([])
    if choice == "required":
        return ToolUse(tools, forced=True, parallel=parallel)
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise InvalidArgument(
            f"tool_choice is {choice!r}; it must be none, auto, required or "
            '{"type": "function", "function": {"name": …}}',
            field="tool_choice",
        )
    return ToolUse(tools, forced=True, name=name)


def finish_reason(answer: Answer, called: bool) -> str:
    """As OpenAI names it."""
    return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason


def call_id(talk: Conversation, choice: int, index: int) -> str:
    """The name of a call, unique among all requests."""
    return f"call_{talk.request.unique_id}{choice:02d}{index:02d}"


async def _whole(engine: Engine, talk: Conversation, count: int, head: dict[str, Any]) -> dict[str, Any]:
    answers: dict[int, Answer] = {}
    async for came in answers_to(engine, talk, count):
        if isinstance(came.what, Answer):
            answers[came.index] = came.what
    ordered = [answers[index] for index in range(count)]
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(engine, talk, index, answer) for index, answer in enumerate(ordered)],
        "usage": usage_of(ordered),
        "timings": timings_of(ordered[0]),
    }


def _choice(engine: Engine, talk: Conversation, index: int, answer: Answer) -> dict[str, Any]:
    parser = talk.parser()
    said = collect([*parser.push(answer.text or ""), *parser.finish()])
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["content"] = said.content.strip() or None
        message["tool_calls"] = [
            {
                "id": call_id(talk, index, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(said.tool_calls)
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(engine.files.tokenizer, answer.token_ids, answer.logprobs or ()),
        "finish_reason": finish_reason(answer, bool(said.tool_calls)),
    }


async def _stream(
    engine: Engine, talk: Conversation, count: int, head: dict[str, Any], *, usage: bool
) -> AsyncGenerator[dict[str, Any] | str]:
    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": reason}
        return {**head, "object": "chat.completion.chunk", "choices": [choice], **untold, **more}

    # The last chunk tells it; the others say that it comes.
    untold = {"usage": None} if usage else {}
    answers: list[Answer] = []
    parsers = [talk.parser() for _ in range(count)]
    begun: set[int] = set()
    called: set[int] = set()

    def deltas(index: int, events: Iterable[Event]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ContentDelta():
                    found.append({"content": event.text})
                case ReasoningDelta():
                    found.append({"reasoning_content": event.text})
                case ToolCallStart():
                    call = {
                        "index": event.index,
                        "id": call_id(talk, index, event.index),
                        "type": "function",
                        "function": {"name": event.name, "arguments": ""},
                    }
                    found.append({"tool_calls": [call]})
                case ToolCallArguments():
                    piece = {"index": event.index, "function": {"arguments": event.text}}
                    found.append({"tool_calls": [piece]})
                case ToolCallEnd():
                    called.add(index)
        return found

    async for came in answers_to(engine, talk, count):
        index, what = came.index, came.what
        if index not in begun:
            begun.add(index)
            yield chunk(index, {"role": "assistant", "content": ""})
        if isinstance(what, Answer):
            answers.append(what)
            for delta in deltas(index, parsers[index].finish()):
                yield chunk(index, delta)
            yield chunk(index, {}, finish_reason(what, index in called), timings=timings_of(what))
            continue
        found = deltas(index, parsers[index].push(what.text))
        logprobs = chat_logprobs(engine.files.tokenizer, what.token_ids, what.logprobs)
        if logprobs is not None and not found:
            found = [{"content": ""}]
        for delta in found:
            yield chunk(index, delta, logprobs=logprobs)
            logprobs = None
    if usage:
        yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(answers)}
    yield "[DONE]"
