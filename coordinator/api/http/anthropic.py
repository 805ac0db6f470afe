"""/v1/messages and /v1/messages/count_tokens: Anthropic's API for chats."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.answer import Answer
from coordinator.api.engine_requests import check_model, max_counted_tokens, render
from coordinator.api.http.chat_exchange import ChatExchange, ExchangeReply, Talk, ToolUse, prepare_exchange
from coordinator.api.http.documented import ANSWER, ANTHROPIC_ERRORS
from coordinator.api.http.field_decisions import Api, refuse_fields
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.replies import SentEvent
from coordinator.api.http.reply_form import Parts, answer_of
from coordinator.api.http.replying import reply
from coordinator.api.http.schemas import (
    ChatMessage,
    FunctionCall,
    FunctionDefinition,
    LenientModel,
    ResponseFormat,
    SamplingFields,
    Tool,
    ToolCall,
)
from coordinator.api.http.thinking import adaptive_variables, thinking_variables
from coordinator.api.http.usage import timings_of
from coordinator.engine.engine import Engine
from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)
from services.errors import InvalidArgument
from services.text_threads import on_text_thread


class Block(LenientModel):
    """A part of a message: text, thinking, tool_use or tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class AnthropicMessage(LenientModel):
    """One message of a chat; its content is a text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(LenientModel):
    """A tool that may be called; input_schema is the JSON schema of its arguments."""

    type: str | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class ToolChoice(LenientModel):
    """Which tool the model calls: what it likes, any of them, the named one, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(LenientModel):
    """Whether the model thinks before it answers.

    budget_tokens: how much, which a chat template may read as `thinking_budget`. display: whether that is shown.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(LenientModel):
    """The JSON schema that the answer's text must fit."""

    type: Literal["json_schema"]
    # `schema` itself is a method of pydantic's.
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientModel):
    """What the answer must be, and how much effort it takes, which a chat template may read as `reasoning_effort`."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(LenientModel):
    """The body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, SamplingFields):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False


def routes(engine: Engine, answers: KeptAnswers) -> APIRouter:
    """Return the routes of this API."""
    router = APIRouter(tags=["Anthropic"], route_class=JsonRoute, responses=ANTHROPIC_ERRORS)

    @router.post("/v1/messages", response_model=None, responses=ANSWER)
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        """A chat, answered by the model; `stream` gives named server-sent events."""
        check_model(engine, body.model)
        refuse_fields(Api.MESSAGES, body)
        body.stop = body.stop_sequences
        answer_format, format_field = _answer_format(body)

        async def form() -> MessageReply:
            exchange = await prepare_exchange(
                engine,
                body,
                await on_text_thread(len(body.messages), _talk, engine, body, body.max_tokens),
                max_tokens=body.max_tokens,
                answer_format=answer_format,
                format_field=format_field,
            )
            head = {
                "id": f"msg_{exchange.request.request_id}",
                "type": "message",
                "role": "assistant",
                "model": body.model or engine.name,
            }
            return MessageReply(exchange, head, body.thinking is None or body.thinking.display != "omitted")

        return await reply(http, answers, form, stream=body.stream)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """How many tokens a conversation takes."""
        check_model(engine, body.model)
        refuse_fields(Api.MESSAGES, body)
        talk = await on_text_thread(len(body.messages), _talk, engine, body)
        chat, _ = await on_text_thread(len(body.messages), talk.in_template, engine)
        prompt = await render(engine, chat, most=max_counted_tokens(engine))
        return {"input_tokens": len(prompt.token_ids)}

    return router


def _talk(engine: Engine, body: CountRequest, max_tokens: int | None = None) -> Talk:
    """Return the conversation; where its last message is a text of the assistant's, the answer goes on with that.

    Raises InvalidArgument for thinking that the model cannot do or leave, or that leaves no room for an answer.
    """
    template, thinking, variables = engine.files.chat_template, body.thinking, dict[str, Any]()
    continued = body.messages[-1].role == "assistant" and not _calls(body.messages[-1])
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if thinking is not None and thinking.type == "adaptive":
        variables |= adaptive_variables(template)
    elif thinking is not None:
        enabled = thinking.type == "enabled"
        variables |= thinking_variables(template, enabled, "thinking")
        if enabled and continued:
            raise InvalidArgument(
                "thinking is enabled, and the last message is the assistant's: an answer that has begun cannot be "
                "thought over; leave one of them out",
                field="thinking",
            )
    if thinking is not None and thinking.budget_tokens is not None:
        if max_tokens is not None and thinking.budget_tokens >= max_tokens:
            raise InvalidArgument(
                f"thinking.budget_tokens is {thinking.budget_tokens}; it must be below max_tokens, {max_tokens}",
                field="thinking.budget_tokens",
            )
        variables["thinking_budget"] = thinking.budget_tokens
    variables |= body.chat_template_kwargs or {}
    return Talk(make_messages(body), _tool_use(body), variables, continued)


def _calls(message: AnthropicMessage) -> bool:
    return not isinstance(message.content, str) and any(block.type == "tool_use" for block in message.content)


def _answer_format(body: CountRequest) -> tuple[ResponseFormat | None, str]:
    """Return what the answer must be, and the field that says so. Raises InvalidArgument for two fields that do."""
    configured = body.output_config.format if body.output_config is not None else None
    if configured is not None and body.output_format is not None:
        raise InvalidArgument(
            "output_config.format and output_format each say what the answer must be: give one of them",
            field="output_format",
        )
    found, field = (configured, "output_config.format") if configured else (body.output_format, "output_format")
    if found is None:
        return None, field
    return ResponseFormat(type="json_schema", json_schema={"schema": found.json_schema}), field


def make_messages(body: CountRequest) -> list[ChatMessage]:
    """Return the conversation as the messages of a chat. Raises InvalidArgument naming the block at fault."""
    messages = [ChatMessage(role="system", content=_text(body.system, "system"))] if body.system else []
    for index, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            messages.append(ChatMessage(role=turn.role, content=turn.content))
        else:
            messages += _turn(turn.role, turn.content, f"messages.{index}.content")
    return messages


def _turn(role: str, blocks: Sequence[Block], field: str) -> list[ChatMessage]:
    results = [
        ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content, field))
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
    text = _text(others, field)
    if not (text or calls or thinking) and results:
        return results
    message = ChatMessage(role=role, content=text, tool_calls=calls or None, reasoning_content=thinking or None)
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
    """Return why the answer ended, in Anthropic's words. called: whether it holds a tool call."""
    if answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


@dataclass(frozen=True, slots=True)
class MessageReply(ExchangeReply):
    """How an answer is told as a message. head: what the message begins with. shown: whether the text of its thinking
    is."""

    shown: bool

    async def whole(self, engine: Engine, parts: Parts) -> dict[str, Any]:
        """See `ReplyForm`."""
        exchange, head, shown = self.exchange, self.head, self.shown
        answer, _ = await answer_of(parts)
        content = _content(exchange, _displayed(exchange.read(answer), shown))
        stop = _stop(answer, any(block["type"] == "tool_use" for block in content))
        return {**head, "content": content, **stop, "usage": _usage(answer), "timings": timings_of(answer)}

    async def stream(self, engine: Engine, parts: Parts) -> AsyncGenerator[SentEvent]:
        """See `ReplyForm`."""
        exchange, head, shown = self.exchange, self.head, self.shown

        def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
            return kind, {"type": kind, **fields}

        index, open_kind, called, begun = -1, "", False, False
        parser = exchange.parser()
        async for part in parts:
            if not begun:
                begun = True
                start = {"input_tokens": len(exchange.request.prompt_ids), "output_tokens": 0}
                message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": start}
                yield event("message_start", message=message)
                yield event("ping")
            answer = part.content if isinstance(part.content, Answer) else None
            text = "" if isinstance(part.content, Answer) else part.content.text
            events = parser.push(text) if answer is None else parser.finish(cut=answer.cut)
            for parsed in _displayed(events, shown):
                kind, block, delta = "", dict[str, Any](), dict[str, Any]()
                match parsed:
                    case ContentDelta():
                        kind, block = "text", {"type": "text", "text": ""}
                        delta = {"type": "text_delta", "text": parsed.text}
                        if open_kind != "text" and called and not parsed.text.strip():
                            continue
                    case ReasoningDelta():
                        kind, block = "thinking", {"type": "thinking", "thinking": "", "signature": ""}
                        delta = {"type": "thinking_delta", "thinking": parsed.text} if parsed.text else {}
                    case ToolCallStart():
                        kind = f"call {parsed.index}"
                        block = {
                            "type": "tool_use",
                            "id": _call_id(exchange, parsed.index),
                            "name": parsed.name,
                            "input": {},
                        }
                    case ToolCallArguments():
                        kind, delta = f"call {parsed.index}", {"type": "input_json_delta", "partial_json": parsed.text}
                    case ToolCallEnd() | ToolCallCut():
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
                yield event(
                    "message_delta", delta=_stop(answer, called), usage=_usage(answer), timings=timings_of(answer)
                )
                yield event("message_stop")


def _displayed(events: Iterable[Event], shown: bool) -> list[Event]:
    """Return the events with the text of thinking left out where it is not shown; its block stays."""
    return [ReasoningDelta("") if isinstance(event, ReasoningDelta) and not shown else event for event in events]


def _content(exchange: ChatExchange, events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the blocks of a whole answer in their order. A call that max_tokens cut is one of them; of a call that
    turned out to be none there is only its text."""
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
                call, arguments = {"type": "tool_use", "id": _call_id(exchange, index), "name": name}, []
            case ToolCallArguments(_, text):
                arguments.append(text)
            case ToolCallEnd() | ToolCallCut():
                blocks.append({**call, "input": _input("".join(arguments))})
    return blocks or [{"type": "text", "text": ""}]


def _input(arguments: str) -> object:
    """Return the input of a call; of one that was cut the members that are whole, as Anthropic's SDKs read a stream."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        with contextlib.suppress(ValueError):  # nested too deeply
            return from_json(arguments, allow_partial=True)
        return {}


def _call_id(exchange: ChatExchange, number: int) -> str:
    return f"toolu_{exchange.request.unique_id}{number:02d}"
