"""A tool call that max_tokens cuts at any token, as the SDKs of OpenAI and Anthropic show it, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.coordinator.api.http.conftest import Connect
from tests.coordinator.fakes import CHATML, HERMES, Script, engine, says

ASK: Any = [{"role": "user", "content": "hi"}]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
BLOCK_TOOLS: Any = [{"name": "add", "input_schema": PARAMETERS}]
ARGUMENTS = '{"a": "xyz", "b": 12}'
XML = CHATML + "{#- <tool_call>\n<function=name> -#}"
ANSWERS = {
    "hermes": f'Wait.\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "xml": "Wait.\n<tool_call>\n<function=add>\n<parameter=a>\nxyz\n</parameter>\n<parameter=b>\n12\n</parameter>\n"
    "</function>\n</tool_call>",
}
TEMPLATES = {"hermes": HERMES, "xml": XML}
FORMATS = sorted(ANSWERS)
one_format = pytest.mark.parametrize("url", ["hermes", pytest.param("xml", marks=pytest.mark.slow)], indirect=True)
"""By default; parsers of all formats are tested with turns that are cut anywhere."""


@pytest.fixture(params=FORMATS)
async def url(request: pytest.FixtureRequest, connect: Connect) -> tuple[str, int]:
    """A server whose model calls in one of the formats, and how many tokens its answer has."""
    answer = says(ANSWERS[request.param])
    served = engine(Script(answer), template=TEMPLATES[request.param], max_waiting=200)
    return str((await connect(served, network=True)).http.base_url), len(answer)


@one_format
async def test_chat_completions(url: tuple[str, int]) -> None:
    """A call so far with `length`, the same streamed and whole, and never a tag as text."""
    seen = set()
    async with AsyncOpenAI(base_url=f"{url[0]}/v1", api_key="none", max_retries=0) as client:

        async def check(tokens: int) -> None:
            fields: Any = {"model": "demo", "messages": ASK, "tools": CHAT_TOOLS, "max_tokens": tokens}
            [whole] = (await client.chat.completions.create(**fields)).choices
            content, name, arguments, reason = "", None, "", None
            async for chunk in await client.chat.completions.create(stream=True, **fields):
                [choice] = chunk.choices
                reason = choice.finish_reason or reason
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    name, arguments = call.function.name or name, arguments + (call.function.arguments or "")
            assert "Wait.".startswith((whole.message.content or "").rstrip())
            assert "Wait.".startswith(content.rstrip())
            assert reason == whole.finish_reason == ("tool_calls" if tokens == url[1] else "length")
            calls: Any = whole.message.tool_calls or []
            assert [(call.function.name, call.function.arguments) for call in calls] == (
                [(name, arguments)] if name else []
            )
            assert ARGUMENTS.startswith(arguments)
            seen.add(arguments)

        await asyncio.gather(*(check(tokens) for tokens in range(1, url[1] + 1)))
    assert {"", "{", ARGUMENTS} <= seen
    assert len(seen) > 5


@one_format
async def test_responses(url: tuple[str, int]) -> None:
    """The call is an item that is incomplete, as the response is."""
    async with AsyncOpenAI(base_url=f"{url[0]}/v1", api_key="none", max_retries=0) as client:

        async def check(tokens: int) -> None:
            fields: Any = {"model": "demo", "input": "hi", "tools": FLAT_TOOLS, "max_output_tokens": tokens}
            whole = await client.responses.create(**fields)
            events = [event async for event in await client.responses.create(stream=True, **fields)]
            last: Any = events[-1]
            assert [shown(item) for item in last.response.output] == [shown(item) for item in whole.output]
            assert last.response.status == whole.status == ("completed" if tokens == url[1] else "incomplete")
            assert "Wait.".startswith(whole.output_text.rstrip())
            for item in whole.output:
                assert item.type in ("message", "function_call")
                if item.type == "function_call":
                    assert ARGUMENTS.startswith(item.arguments)
                    assert (item.status == "completed") <= (item.arguments == ARGUMENTS)

        await asyncio.gather(*(check(tokens) for tokens in range(1, url[1] + 1)))


def shown(item: Any) -> Any:
    return item.model_dump(exclude={"id", "call_id"})


@one_format
async def test_messages(url: tuple[str, int]) -> None:
    """`max_tokens` with a block whose input holds the members that are whole; streamed it is put together alike."""
    inputs = []
    async with AsyncAnthropic(base_url=url[0], api_key="none", max_retries=0) as client:

        async def check(tokens: int) -> None:
            fields: Any = {"model": "demo", "messages": ASK, "tools": BLOCK_TOOLS, "max_tokens": tokens}
            whole = await client.messages.create(**fields)
            async with client.messages.stream(**fields) as stream:
                streamed = await stream.get_final_message()
            assert streamed.stop_reason == whole.stop_reason == ("tool_use" if tokens == url[1] else "max_tokens")
            for message in (whole, streamed):
                text = "".join(block.text for block in message.content if block.type == "text")
                assert "Wait.".startswith(text.rstrip())
            calls, others = ([block for block in m.content if block.type == "tool_use"] for m in (whole, streamed))
            assert [(call.name, call.input) for call in calls] == [(call.name, call.input) for call in others]
            inputs.extend(call.input for call in calls)

        await asyncio.gather(*(check(tokens) for tokens in range(1, url[1] + 1)))
    assert {} in inputs
    assert {"a": "xyz"} in inputs
    assert {"a": "xyz", "b": 12} in inputs
