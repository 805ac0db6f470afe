"""The body of /v1/responses, and the conversation that its input items stand for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

from pydantic import Field

from coordinator.api.http.chat_exchange import ToolUse
from coordinator.api.http.schemas import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    LenientModel,
    ResponseFormat,
    SamplingFields,
    Tool,
    ToolCall,
)
from coordinator.text.bounded_json import parse_json
from services.errors import InvalidArgument

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Item(LenientModel):
    """One item of the input: a message (with or without a type), a function call, its output, or reasoning."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FlatTool(LenientModel):
    """A function that may be called; its fields are not inside a `function` object as those of chats are."""

    type: str
    name: str | None = Field(None, min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(LenientModel):
    """What the answer's text must be: any text, any JSON object, or an object of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    # `schema` itself is a method of pydantic's.
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(LenientModel):
    """Options of the answer's text. verbosity: how long it is, where the chat template reads that."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(LenientModel):
    """How much the model thinks. Its thinking comes whole, whatever kind of summary is asked for."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(SamplingFields):
    """The body of /v1/responses."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    background: bool = False
    tools: list[FlatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def make_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """Return the conversation as the messages of a chat.

    The items that the model produced in one turn become one message, as templates expect it. System messages at the
    beginning become one, as many templates accept only one. Raises InvalidArgument naming the item at fault.
    """
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    if not body.input:
        raise InvalidArgument("input is an empty list: give a text or at least one item", field="input")
    for index, item in enumerate(body.input):
        _add(messages, item, f"input.{index}")
    first = [*takewhile(lambda message: message.role == "system", messages)]
    if len(first) < 2:
        return messages
    content = "\n\n".join(str(message.content) for message in first)
    return [ChatMessage(role="system", content=content), *messages[len(first) :]]


def _add(messages: list[ChatMessage], item: Item, field: str) -> None:
    last = messages[-1] if messages else None
    match item.type or "message":
        case "message":
            role = _role(item, field)
            text = _text(item.content, f"{field}.content")
            if role == "assistant" and last is not None and _is_only_reasoning(last):
                last.content = text
            else:
                messages.append(ChatMessage(role=role, content=text))
        case "reasoning":
            text = _text(item.content, f"{field}.content") or _text(item.summary, f"{field}.summary")
            if text:
                messages.append(ChatMessage(role="assistant", reasoning_content=text))
        case "function_call":
            if not item.name:
                raise InvalidArgument(f"{field}.name is missing: name the function called", field=f"{field}.name")
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=_arguments(item, field)))
            if last is None or last.role != "assistant":
                last = ChatMessage(role="assistant")
                messages.append(last)
            last.tool_calls = last.tool_calls or []
            last.tool_calls.append(call)
        case "function_call_output":
            content = _text(item.output, f"{field}.output")
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=content))
        case other:
            raise InvalidArgument(
                f"{field}.type is {other!r}; it must be message, function_call, function_call_output or reasoning",
                field=f"{field}.type",
            )


def _role(item: Item, field: str) -> str:
    # Few templates know `developer`, and many leave out messages of a role that they don't know.
    role = "system" if item.role == "developer" else item.role
    if role not in ("system", "user", "assistant"):
        raise InvalidArgument(
            f"{field}.role is {item.role!r}; it must be user, assistant, system or developer", field=f"{field}.role"
        )
    return role


def _is_only_reasoning(message: ChatMessage) -> bool:
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _arguments(item: Item, field: str) -> dict[str, Any]:
    try:
        value = parse_json(item.arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(
            f"{field}.arguments is {str(item.arguments)[:80]!r}; it must be the text of a JSON object",
            field=f"{field}.arguments",
        )
    return value


def _text(content: str | Sequence[ContentPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = (part.model_extra or {}).get("refusal") if part.type == "refusal" else part.text
        if part.type not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise InvalidArgument(
                f"{field} has a part of type {part.type!r}; this model reads text only (input_text, output_text)",
                field=field,
            )
        texts.append(text)
    return "".join(texts)


def tool_use(body: ResponsesRequest) -> ToolUse:
    """Return what `tools` and `tool_choice` mean together. Raises InvalidArgument for a tool that is no function."""
    tools = []
    for index, tool in enumerate(body.tools or []):
        if tool.type != "function" or tool.name is None:
            raise InvalidArgument(
                f"tools.{index} is of type {tool.type!r} with the name {tool.name!r}; it must be of type 'function' "
                "with a name: no other tools are built in",
                field=f"tools.{index}",
            )
        function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.parameters)
        tools.append(Tool(function=function))
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if choice is None or choice == "auto":
        return ToolUse(tools, parallel=parallel)
    if choice == "none":
        return ToolUse([])
    if choice == "required":
        return ToolUse(tools, forced=True, parallel=parallel)
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise InvalidArgument(
            f'tool_choice is {str(choice)[:80]!r}; it must be none, auto, required or {{"type": "function", '
            '"name": …}',
            field="tool_choice",
        )
    return ToolUse(tools, forced=True, name=name)


def answer_format(body: ResponsesRequest) -> ResponseFormat | None:
    """Return `text.format` in the form of chat completions.

    Raises InvalidArgument for a json_schema without a schema.
    """
    wanted_format = body.text.format if body.text is not None else None
    if wanted_format is None:
        return None
    if wanted_format.type == "json_schema" and wanted_format.json_schema is None:
        raise InvalidArgument("text.format.schema is missing: give the JSON schema as an object", field="text.format")
    return ResponseFormat(type=wanted_format.type, json_schema={"schema": wanted_format.json_schema})
