"""Calls as Llama writes them: at the beginning, behind its tag, several of them, and what is none."""

from __future__ import annotations

import pytest

from coordinator.text.parsers.collected import CollectedToolCall, collect
from coordinator.text.parsers.events import ToolCallArguments, ToolCallEnd, ToolCallStart
from coordinator.text.parsers.tools.llama3_json import Parser
from tests.coordinator.text.parsers.reading import TOOLS, read

ADD = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
CALLED = CollectedToolCall("add", '{"a": 1, "b": 2}')
NOW = CollectedToolCall("now", "{}")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (ADD, [CALLED]),
        (f"\n {ADD}\n", [CALLED]),
        (f"<|python_tag|>{ADD}", [CALLED]),
        (f'{ADD}; {{"name": "now", "parameters": {{}}}}', [CALLED, NOW]),
        (f'{ADD}\n<|python_tag|>{{"name": "now"}}', [CALLED, NOW]),
        (f"{ADD}{ADD}", [CALLED, CALLED]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [CALLED]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', [CALLED]),
    ],
)
def test_an_answer_of_calls(text: str, calls: list[CollectedToolCall]) -> None:
    """However it was cut; the white space and the semicolons between them are layout."""
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        found = collect(read(Parser(TOOLS), pieces))
        assert (found.content, list(found.tool_calls)) == ("", calls), pieces


def test_arguments_stream() -> None:
    """Name and arguments come as soon as they are certain."""
    parser = Parser(TOOLS)
    assert parser.push(' {"name": "write_file", "param') == []
    assert parser.push('eters": {"text": "ab') == [ToolCallStart(0, "write_file"), ToolCallArguments(0, '{"text": "ab')]
    assert parser.push('"}}') == [ToolCallArguments(0, '"}'), ToolCallEnd(0)]
    assert parser.push("; ") == []
    assert parser.finish() == []


def test_text_around_a_tag_is_content() -> None:
    """Behind text only the tag begins a call."""
    found = collect(read(Parser(TOOLS), f"Let me add: <|python_tag|>{ADD}; done"))
    assert (found.content, found.tool_calls) == ("Let me add:done", (CALLED,))


@pytest.mark.parametrize(
    "text",
    [
        f"Like so: {ADD}",
        '{"answer": 4}',
        '{"name": "unknown", "parameters": {}}',
        '{"type": "tool", "name": "add", "parameters": {}}',
        '{"name": "add", "parameters": {}, "arguments": {}}',
        '<|python_tag|>brave_search.call(query="weather")',
        '{"name": "add", "parameters": ',
        "{ {",
        " \n",
        "<|python",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    """Text that only looks like a call comes out unchanged."""
    found = collect(read(Parser(TOOLS), text))
    assert (found.content, found.tool_calls) == (text, ())
