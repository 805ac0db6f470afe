"""What the chat APIs share: a conversation becomes a request, its answer reasoning, content and tool calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.answer import Answer, Request
from coordinator.api.engine_requests import render
from coordinator.api.http.body_conversion import choices_of, compression_params, make_chat, make_request
from coordinator.api.http.choices import ChoicePart, answer_all
from coordinator.api.http.schemas import ChatMessage, ResponseFormat, SamplingFields, Tool
from coordinator.engine.engine import Engine
from coordinator.text.parsers.events import Event
from coordinator.text.parsers.grammar import forced_call_grammar
from coordinator.text.parsers.lark import json_schema
from coordinator.text.parsers.pipeline import OutputParser
from coordinator.text.parsers.reasoning import Opening, ReasoningParser, opening_of
from coordinator.text.parsers.tags import END_THINK, TAGS, THINK
from coordinator.text.parsers.tool_schema import read_tools
from coordinator.text.parsers.tools import NONE, detect, new_parser
from coordinator.text.prompt import Prompt
from services.errors import InvalidArgument
from services.messages.steps import Grammar, GrammarKind

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that may be called. forced: one of them must be, or the one called `name` if that is not None.

    parallel: whether one answer may hold several calls.
    """

    tools: Sequence[Tool]
    forced: bool = False
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """One question and its answer: the engine's request, and how to read the text that the model answers with.

    opening: whether the prompt has opened the model's thinking. thinks: whether the template knows thinking at all.
    format: how the model writes tool calls, by the name of its parser.
    """

    request: Request
    opening: Opening
    thinks: bool
    format: str
    tools: list[dict[str, Any]]
    bound_by: str
    """The client's field that the answer's grammar is made of, if there is one."""

    def parser(self) -> OutputParser:
        """Return a new parser for one answer."""
        reasoning = ReasoningParser(inside=self.opening is Opening.INSIDE, enabled=self.thinks)
        return OutputParser(reasoning, new_parser(self.format, self.tools))

    def read(self, answer: Answer) -> list[Event]:
        """Return the events of a whole answer."""
        parser = self.parser()
        return [*parser.push(answer.text or ""), *parser.finish(cut=answer.cut)]


async def prepare_exchange(
    engine: Engine,
    fields: SamplingFields,
    messages: Sequence[ChatMessage],
    use: ToolUse,
    *,
    max_tokens: int | None,
    variables: dict[str, Any] | None = None,
    answer_format: ResponseFormat | None = None,
    format_field: str = "response_format",
    logprobs: int | None = None,
) -> ChatExchange:
    """Render and check a conversation and return it as a request.

    format_field: what the client calls answer_format. Raises InvalidArgument naming the client's field, and
    TemplateError where the chat template refuses the conversation.
    """
    chat = make_chat(messages, use.tools, variables)
    structured = use.forced or (answer_format is not None and answer_format.type != "text")
    prompt = await render(engine, chat, compression_params(fields), structured=structured)
    template = engine.files.chat_template
    source = "" if template is None else template.source
    call_format = detect(source)
    opening = opening_of(prompt.text)
    tools = chat.tools or []
    read_tools(tools)  # refuses names that are there twice now, not when an answer is read
    request = replace(make_request(engine, fields, prompt, max_tokens), logprobs=logprobs)
    grammar = _grammar(engine, prompt, opening, call_format, tools, use, answer_format)
    if grammar is not None:
        request = replace(request, grammar=grammar)
    bound_by = "tools" if use.forced else format_field
    return ChatExchange(request, opening, THINK in source, call_format if tools else NONE, tools, bound_by)


async def answer_exchange(engine: Engine, exchange: ChatExchange, count: int = 1) -> AsyncGenerator[ChoicePart]:
    """Answer with `count` choices, as `answer_all` does; a refusal of the grammar names the client's field."""
    try:
        async with contextlib.aclosing(answer_all(engine, choices_of(exchange.request, count))) as parts:
            async for part in parts:
                yield part
    except InvalidArgument as error:
        field = str(error.where.get("field", ""))
        if not field.startswith("grammar"):
            raise
        raise InvalidArgument(
            f"{exchange.bound_by} cannot be used: {error.message.removeprefix(f'{field} cannot be used: ')}",
            reason=error.reason,
            field=exchange.bound_by,
        ) from error


def _grammar(
    engine: Engine,
    prompt: Prompt,
    opening: Opening,
    call_format: str,
    tools: list[dict[str, Any]],
    use: ToolUse,
    answer_format: ResponseFormat | None,
) -> Grammar | None:
    tokenizer = engine.files.tokenizer
    assert tokenizer is not None
    single = frozenset(tag for tag in TAGS if tokenizer.token_id(tag) is not None)
    if use.forced:
        if call_format == NONE:
            raise InvalidArgument(
                "tool_choice asks for a call, and this model's chat template teaches no format of calls: leave it auto",
                field="tool_choice",
            )
        text = forced_call_grammar(
            call_format, tools, use.name, opening=opening, parallel=use.parallel, single_tokens=single
        )
        return Grammar(GrammarKind.LARK, text)
    if answer_format is None or answer_format.type == "text":
        return None
    schema = ANY_OBJECT
    if answer_format.type == "json_schema":
        schema_object = (answer_format.json_schema or {}).get("schema")
        if not isinstance(schema_object, dict):
            raise InvalidArgument(
                "response_format.json_schema.schema is missing: give the JSON schema as an object",
                field="response_format.json_schema",
            )
        schema = schema_object
    if opening is not Opening.INSIDE:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    # The model thinks first; only what comes after is bound.
    end = f"thinking: /(?s:.*)/ {END_THINK}" if END_THINK in single else "thinking[lazy]: /(?s:.*)<\\/think>/"
    body = json_schema(schema, lenient=False)
    return Grammar(GrammarKind.LARK, f'start: thinking "\\n\\n" body\nbody: {body}\n{end}\n')
