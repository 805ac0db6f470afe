"""/v1/messages and /v1/messages/count_tokens: Anthropic's API over the same conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coordinator.answer import Answer
from coordinator.api.http.conversation import Conversation, ToolUse, answers_to, converse
from coordinator.api.http.documented import ANSWER, ANTHROPIC_ERRORS
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.replies import event_stream, unless_gone
from coordinator.api.http.request_bodies import check_model, make_chat, render
from coordinator.api.http.schemas import FunctionCall, FunctionDefinition, Message, Open, SamplingFields, Tool, ToolCall
from coordinator.api.http.usage import timings_of
from coordinator.engine.engine import Engine
from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from services.errors import InvalidArgument


class Block(Open):
    """A part of a message: text, thinking, tool_use or tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Turn(Open):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Open):
    type: str | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class ToolChoice(Open):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountRequest(Open):
    """/v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest, SamplingFields):
    """/v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


def routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=JsonRoute, responses=ANTHROPIC_ERRORS)

    @router.post("/v1/messages", response_model=None, responses=ANSWER)
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        """A chat, answered by the model; `stream` gives named server-sent events."""
        check_model(engine, body.model)
        body.stop = body.stop_sequences
        talk = await unless_gone(
            http,
            converse(
                engine,
                body,
                make_messages(body),
                _tool_use(body),
                max_tokens=body.max_tokens,
                variables=body.chat_template_kwargs,
            ),
        )
        head = {
            "id": f"msg_{talk.request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": body.model or engine.name,
        }
        if body.stream:
            return await event_stream(http.url.path, _stream(engine, talk, head))
        return JSONResponse(await unless_gone(http, _whole(engine, talk, head)))

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """How many tokens a conversation takes."""
        check_model(engine, body.model)
        prompt = await render(engine, make_chat(make_messages(body), _tool_use(body).tools, None))
        return {"input_tokens": len(prompt.token_ids)}

    return router


def make_messages(body: CountRequest) -> list[Message]:
    """The conversation in the form that chat templates take."""
    found = [Message(role="system", content=_text(body.system, "system"))] if body.system else []
    for index, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            found.append(Message(role=turn.role, content=turn.content))
        else:
            found += _turn(turn.role, turn.content, f"messages.{index}.content")
    return found


def _turn(role: str, blocks: Sequence[Block], field: str) -> list[Message]:
    results = [
        Message(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content, field))
        for block in blocks
        if block.type == "tool_result"
    ]
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name or "", arguments=block.input or {}))
        for block in blocks
        if block.type == "tool_use"
    ]
    thinking = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    others = [b for b in blocks if b.type not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    said = _text(others, field)
    if not (said or calls or thinking) and results:
        return results
    message = Message(role=role, content=said, tool_calls=calls or None, reasoning_content=thinking or None)
    return [*results, message]


def _text(content: str | Sequence[Block] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise InvalidArgument(
                f"{field} has a block of type {block.type!r}; this model reads text only", field=field
            )
    return "".join(block.text or "" for block in content)


def _tool_use(body: CountRequest) -> ToolUse:
    for index, tool in enumerate(body.tools or []):
        if tool.type not in (None, "custom"):
            raise InvalidArgument(
                f"tools.{index} is of type {tool.type!r}; it must be of type 'custom' with an input_schema: no other "
                "tools are built in",
                field=f"tools.{index}",
            )
    tools = [
        Tool(function=FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema))
        for tool in body.tools or []
    ]
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return ToolUse(tools, parallel=choice is None or not choice.disable_parallel_tool_use)
    if choice.type == "none":
        return ToolUse([])
    if choice.type == "tool" and choice.name is None:
        raise InvalidArgument("tool_choice.name is missing: name the tool", field="tool_choice")
    name = choice.name if choice.type == "tool" else None
    return ToolUse(tools, forced=True, name=name, parallel=not choice.disable_parallel_tool_use)


def _usage(answer: Answer) -> dict[str, int]:
    stats = answer.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.completion_tokens,
    }


def _stop(answer: Answer, called: bool) -> dict[str, Any]:
    """Why the answer ended, as Anthropic names it."""
    if answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


async def _whole(engine: Engine, talk: Conversation, head: dict[str, Any]) -> dict[str, Any]:
    answer = None
    async for came in answers_to(engine, talk):
        if isinstance(came.what, Answer):
            answer = came.what
    assert answer is not None
    parser = talk.parser()
    content = _content(talk, [*parser.push(answer.text or ""), *parser.finish()])
    stop = _stop(answer, any(block["type"] == "tool_use" for block in content))
    return {**head, "content": content, **stop, "usage": _usage(answer), "timings": timings_of(answer)}


def _content(talk: Conversation, events: Iterable[Event]) -> list[dict[str, Any]]:
    """The blocks of a whole answer, in the order in which they came; of a call that was broken off only its text."""
    blocks: list[dict[str, Any]] = []
    call, arguments = dict[str, Any](), list[str]()
    for event in events:
        last: dict[str, Any] = blocks[-1] if blocks else {"type": None}
        match event:
            case ContentDelta(text):
                if last["type"] == "text":
                    last["text"] += text
                elif text.strip() or last["type"] != "tool_use":
                    blocks.append({"type": "text", "text": text})
            case ReasoningDelta(text):
                if last["type"] == "thinking":
                    last["thinking"] += text
                else:
                    blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case ToolCallStart(index, name):
                call, arguments = {"type": "tool_use", "id": _call_id(talk, index), "name": name}, []
            case ToolCallArguments(_, text):
                arguments.append(text)
            case ToolCallEnd():
                blocks.append({**call, "input": json.loads("".join(arguments))})
    return blocks or [{"type": "text", "text": ""}]


async def _stream(
    engine: Engine, talk: Conversation, head: dict[str, Any]
) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return kind, {"type": kind, **fields}

    index, open_kind, called, begun = -1, "", False, False
    parser = talk.parser()
    async for came in answers_to(engine, talk):
        if not begun:
            begun = True
            start = {"input_tokens": len(talk.request.prompt_ids), "output_tokens": 0}
            message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": start}
            yield event("message_start", message=message)
            yield event("ping")
        answer = came.what if isinstance(came.what, Answer) else None
        for said in parser.finish() if isinstance(came.what, Answer) else parser.push(came.what.text):
            kind, block, delta = "", dict[str, Any](), dict[str, Any]()
            match said:
                case ContentDelta():
                    kind, block = "text", {"type": "text", "text": ""}
                    delta = {"type": "text_delta", "text": said.text}
                    if open_kind != "text" and called and not said.text.strip():
                        continue
                case ReasoningDelta():
                    kind, block = "thinking", {"type": "thinking", "thinking": "", "signature": ""}
                    delta = {"type": "thinking_delta", "thinking": said.text}
                case ToolCallStart():
                    kind = f"call {said.index}"
                    block = {"type": "tool_use", "id": _call_id(talk, said.index), "name": said.name, "input": {}}
                case ToolCallArguments():
                    kind, delta = f"call {said.index}", {"type": "input_json_delta", "partial_json": said.text}
                case ToolCallEnd():
                    called = True
                    continue
            if kind != open_kind:
                if open_kind:
                    yield event("content_block_stop", index=index)
                index, open_kind = index + 1, kind
                yield event("content_block_start", index=index, content_block=block)
            if delta:
                yield event("content_block_delta", index=index, delta=delta)
        if answer is not None:
            if not open_kind:
                index = 0
                yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            yield event("content_block_stop", index=index)
            yield event("message_delta", delta=_stop(answer, called), usage=_usage(answer), timings=timings_of(answer))
            yield event("message_stop")


def _call_id(talk: Conversation, number: int) -> str:
    return f"toolu_{talk.request.unique_id}{number:02d}"
