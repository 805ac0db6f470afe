"""/v1/chat/completions: OpenAI's API for chats, streamed and whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.answer import Answer, Piece, Request
from coordinator.api.engine_requests import check_model
from coordinator.api.http.chat_exchange import (
    ChatExchange,
    ExchangeReply,
    Talk,
    ToolUse,
    exchange_requests,
    prepare_exchange,
)
from coordinator.api.http.documented import ANSWER, OPENAI_ERRORS
from coordinator.api.http.field_decisions import Api, refuse_fields
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.logprobs import chat_logprobs, vllm_prompt_logprobs
from coordinator.api.http.replies import SentEvent, json_event
from coordinator.api.http.reply_form import Parts
from coordinator.api.http.replying import reply
from coordinator.api.http.schemas import ChatRequest
from coordinator.api.http.thinking import effort_variables
from coordinator.api.http.usage import timings_of, usage_of
from coordinator.api.http.written_json import WrittenList
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


def routes(engine: Engine, answers: KeptAnswers) -> APIRouter:
    """Return the routes of this API."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute, responses=OPENAI_ERRORS)

    @router.post("/v1/chat/completions", response_model=None, responses=ANSWER)
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        """A chat, answered by the model; `stream` gives server-sent events."""
        check_model(engine, body.model)
        refuse_fields(Api.CHAT, body)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")

        async def form() -> ChatReply:
            exchange = await prepare_exchange(
                engine,
                body,
                _talk(engine, body),
                max_tokens=body.max_completion_tokens or body.max_tokens,
                answer_format=body.response_format,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                prompt_logprobs=body.prompt_logprobs,
            )
            head = {
                "id": f"chatcmpl-{exchange.request.request_id}",
                "created": int(time.time()),
                "model": body.model or engine.name,
            }
            usage = body.stream_options is not None and body.stream_options.include_usage
            return ChatReply(exchange, head, body.n, usage)

        return await reply(http, answers, form, stream=body.stream)

    return router


def _talk(engine: Engine, body: ChatRequest) -> Talk:
    """Return the conversation. Raises InvalidArgument for fields of it that the chat template cannot heed."""
    template = engine.files.chat_template
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt are both true: the answer goes on with the last message "
            "or begins one",
            field="add_generation_prompt",
        )
    variables = effort_variables(template, body.reasoning_effort, "reasoning_effort")
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    if body.documents:
        if template is not None and "documents" not in template.variables:
            raise InvalidArgument(
                "documents are given, and this model's chat template reads none: put them into a message",
                field="documents",
            )
        variables["documents"] = body.documents
    variables |= body.chat_template_kwargs or {}
    opened = body.add_generation_prompt is not False
    return Talk(body.messages, tool_use(body), variables, body.continue_final_message, opened)


def tool_use(body: ChatRequest) -> ToolUse:
    """Return what `tools` and `tool_choice` mean together. Raises InvalidArgument for a choice of another form."""
    choice, tools = body.tool_choice, body.tools or []
    parallel = body.parallel_tool_calls is not False
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
    """Return why an answer ended, in OpenAI's words. called: whether it holds a tool call."""
    return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason


def call_id(exchange: ChatExchange, choice: int, index: int) -> str:
    """Return the id of a tool call, which no other call of any request has."""
    return f"call_{exchange.request.unique_id}{choice:02d}{index:02d}"


@dataclass(frozen=True, slots=True)
class ChatReply(ExchangeReply):
    """How the answers to a chat are told. count: how many of them. head: what every object begins with. usage: whether
    a stream tells it."""

    count: int
    usage: bool

    @property
    def requests(self) -> list[Request]:
        """See `ReplyForm`."""
        return exchange_requests(self.exchange, self.count)

    async def whole(self, engine: Engine, parts: Parts) -> dict[str, Any]:
        """See `ReplyForm`."""
        exchange, count, head = self.exchange, self.count, self.head
        answers: dict[int, Answer] = {}
        prompt = WrittenList()
        async for part in parts:
            if isinstance(part.content, Answer):
                answers[part.index] = part.content
            else:
                await _add_prompt(prompt, engine, exchange, part.content)
        ordered = [answers[index] for index in range(count)]
        return {
            **head,
            "object": "chat.completion",
            "choices": [
                await asyncio.to_thread(_choice, engine, exchange, index, answer)
                for index, answer in enumerate(ordered)
            ],
            "usage": usage_of(answers, count),
            "timings": timings_of(ordered[0]),
            **({"prompt_logprobs": prompt} if prompt else {}),
        }

    async def stream(self, engine: Engine, parts: Parts) -> AsyncGenerator[SentEvent]:
        """See `ReplyForm`."""
        exchange, count, head, usage = self.exchange, self.count, self.head, self.usage

        def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": reason}
            return {**head, "object": "chat.completion.chunk", "choices": [choice], **no_usage, **more}

        # The last chunk has the usage; null in the others says that it will come.
        no_usage = {"usage": None} if usage else {}
        answers: dict[int, Answer] = {}
        parsers = [exchange.parser() for _ in range(count)]
        prompt = WrittenList()
        begun: set[int] = set()
        called: set[int] = set()

        def deltas(index: int, events: Iterable[Event]) -> list[dict[str, Any]]:
            made: list[dict[str, Any]] = []
            for event in events:
                match event:
                    case ContentDelta():
                        made.append({"content": event.text})
                    case ReasoningDelta():
                        made.append({"reasoning_content": event.text})
                    case ToolCallStart():
                        call = {
                            "index": event.index,
                            "id": call_id(exchange, index, event.index),
                            "type": "function",
                            "function": {"name": event.name, "arguments": ""},
                        }
                        made.append({"tool_calls": [call]})
                    case ToolCallArguments():
                        piece = {"index": event.index, "function": {"arguments": event.text}}
                        made.append({"tool_calls": [piece]})
                    case ToolCallEnd():
                        called.add(index)
            return made

        async for part in parts:
            index, content = part.index, part.content
            if isinstance(content, Piece) and content.prompt:
                await _add_prompt(prompt, engine, exchange, content)
                continue
            if index not in begun:
                begun.add(index)
                # They come with the first choice; another one may be quicker.
                opening = {"role": "assistant", "content": ""}
                if prompt and not index:
                    yield await json_event(chunk(index, opening, prompt_logprobs=prompt))
                else:
                    yield chunk(index, opening)
            if isinstance(content, Answer):
                answers[index] = content
                for delta in deltas(index, parsers[index].finish(cut=content.cut)):
                    yield chunk(index, delta)
                yield chunk(index, {}, finish_reason(content, index in called), timings=timings_of(content))
                continue
            changes = deltas(index, parsers[index].push(content.text))
            logprobs = None
            if content.logprobs:
                entries = chat_logprobs(engine.files.tokenizer, content.token_ids, content.logprobs)
                logprobs = {"content": list(entries), "refusal": None}
                changes = changes or [{"content": ""}]
            for delta in changes:
                yield chunk(index, delta, logprobs=logprobs)
                logprobs = None
        if usage:
            yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(answers, count)}
        yield "[DONE]"


async def _add_prompt(prompt: WrittenList, engine: Engine, exchange: ChatExchange, piece: Piece) -> None:
    """Add the entries of a piece's tokens of the prompt, which are made on a thread."""
    if piece.prompt:
        alternatives = exchange.request.prompt_logprobs or 0
        entries = vllm_prompt_logprobs(engine.files.tokenizer, piece.prompt, alternatives)
        await asyncio.to_thread(prompt.extend, entries)


def _choice(engine: Engine, exchange: ChatExchange, index: int, answer: Answer) -> dict[str, Any]:
    collected = collect(exchange.read(answer))
    message: dict[str, Any] = {"role": "assistant", "content": collected.content}
    if collected.reasoning:
        message["reasoning_content"] = collected.reasoning
    if collected.tool_calls:
        message["content"] = collected.content.strip() or None
        message["tool_calls"] = [
            {
                "id": call_id(exchange, index, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(collected.tool_calls)
        ]
    logprobs = chat_logprobs(engine.files.tokenizer, answer.token_ids, answer.logprobs or ())
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": WrittenList(logprobs), "refusal": None} if answer.logprobs else None,
        "finish_reason": finish_reason(answer, bool(collected.tool_calls)),
    }
