"""Calls as JSON objects: what is one, what isn't, and when each piece is known."""

import json

import pytest

from coordinator.text.parsers.collected import CollectedToolCall, collect
from coordinator.text.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from coordinator.text.parsers.tools.hermes import Parser
from tests.coordinator.text.parsers.reading import TOOLS, read


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def events(text: str) -> list[Event]:
    return read(Parser(TOOLS), [text])


ARGUMENTS = [
    "{}",
    '{"a": 1, "b": 2.5e3}',
    '{ "a":1 ,\n "b":[ ] }',
    '{"text": "ü 語 🎉 \\u00fc \\ud83c\\udf89"}',
    '{"text": "a } b { c ] \\" } \\\\"}',
    '{"text": "</tool_call> and <tool_call>{\\"name\\": \\"add\\"}"}',
    '{"meta": {"x": [{"y": {}}, [[]], null, true]}, "text": "\\n"}',
    '{"text": "it\'s \\"quoted\\" — `code`"}',
    '{"n": 123456789012345678901234567890.12345678901234567890}',
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_come_out_to_the_letter(arguments: str) -> None:
    """A call's arguments are exactly the text that the model wrote, however it was cut."""
    expected = [ToolCallStart(0, "write_file"), ToolCallArguments(0, arguments), ToolCallEnd(0)]
    text = call("write_file", arguments)
    assert events(text) == expected
    assert read(Parser(TOOLS), text) == expected
    for cut in range(1, len(text)):
        assert read(Parser(TOOLS), [text[:cut], text[cut:]]) == expected


def test_text_around_and_several_calls() -> None:
    """Text and calls come in their order, without the white space between them."""
    now, add = call("now", "{}"), call("add", '{"a": 1}')
    text = f"Let me see.\n\n{now}\n{add}\n Half way: \n{now}\nDone.\n"
    assert events(text) == [
        ContentDelta("Let me see."),
        ToolCallStart(0, "now"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
        ToolCallStart(1, "add"),
        ToolCallArguments(1, '{"a": 1}'),
        ToolCallEnd(1),
        ContentDelta("Half way:"),
        ToolCallStart(2, "now"),
        ToolCallArguments(2, "{}"),
        ToolCallEnd(2),
        ContentDelta("Done.\n"),
    ]


def test_arguments_stream() -> None:
    """Name and arguments come as soon as they are certain, piece by piece."""
    parser = Parser(TOOLS)
    assert parser.push('Hi \n<tool_call>\n{"name": "write_file", "argu') == [ContentDelta("Hi")]
    assert parser.push('ments": ') == []
    assert parser.push('{"text": "ab') == [ToolCallStart(0, "write_file"), ToolCallArguments(0, '{"text": "ab')]
    assert parser.push("c}") == [ToolCallArguments(0, "c}")]
    assert parser.push('"}') == [ToolCallArguments(0, '"}')]
    assert parser.push("}") == [ToolCallEnd(0)]
    assert parser.push("\n</tool_call>") == []
    assert parser.push(" \n") == []
    assert parser.push("x") == [ContentDelta("x")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("object_", "arguments"),
    [
        ('{"arguments": {"a": [1]}, "name": "add"}', '{"a": [1]}'),
        ('{"arguments":{},"name":"add"}', "{}"),
        ('{"name": "add"}', "{}"),
        ('{"name": "\\u0061dd", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name":"add","arguments":{"a":1}}', '{"a":1}'),
    ],
)
def test_other_ways_to_write_the_object(object_: str, arguments: str) -> None:
    """The order of the fields and white space don't matter, and arguments may be missing."""
    expected = [ToolCallStart(0, "add"), ToolCallArguments(0, arguments), ToolCallEnd(0)]
    assert events(f"<tool_call>{object_}</tool_call>") == expected
    assert read(Parser(TOOLS), f"<tool_call>\n{object_}\n</tool_call>\n") == expected


NO_CALLS = [
    "no call at all  \n",
    "<tool_call>",
    "a < b <tool",
    "<tool_call>\n</tool_call>",
    "x\n<tool_call>\nadd(1, 2)\n</tool_call>\ny",
    '<tool_call>\n{"name": "unknown", "arguments": {"a": 1}}\n</tool_call>\n',
    '<tool_call>\n{"name": "add", "arguments": "{}"}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": null}\n</tool_call>',
    '<tool_call>\n{"name": "add", "id": 7, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "name": "add"}\n</tool_call>',
    '<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "<tool_call>\n{}\n</tool_call>",
    '<tool_call>\n[{"name": "add", "arguments": {}}]\n</tool_call>',
    '<tool_call>\n{"x": ' + "1" * 5000 + "}\n</tool_call>",
    '<tool_call>\n{"x": ' + "[" * 50_000 + "]" * 50_000 + "}\n</tool_call>",
    '<tool_call>\n{"name": "add"',
    '<tool_call>\n{"name": "add", "arguments": ',
    "</tool_call>",
]
BROKEN_OFF = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, ',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>\n',
    'Hm. \n<tool_call>\n{"name": "add", "arguments": {"a": "one\nline"}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}, "id": 7}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": \'1\'}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1]\n</tool_call>',
]


@pytest.mark.parametrize("text", [*NO_CALLS, *BROKEN_OFF])
def test_what_is_no_call_is_content(text: str) -> None:
    """Text that only looks like a call comes out unchanged."""
    found = events(text)
    assert (collect(found).content, collect(found).tool_calls) == (text, ())
    assert read(Parser(TOOLS), text[:300]) == events(text[:300])
    assert any(isinstance(event, ToolCallStart) for event in found) == (text in BROKEN_OFF)


@pytest.mark.parametrize("bad", [*NO_CALLS[1:], *BROKEN_OFF])
def test_a_good_call_behind_a_bad_one_is_found(bad: str) -> None:
    """Reading goes on where the bad call was broken off."""
    if bad.endswith(("{", " ", '"add"', "}", "<tool")):
        bad += " oops\n"  # let it be seen that it is broken
    found = collect(events(bad + " " + call("add", '{"a": 2}')))
    assert found.tool_calls == (CollectedToolCall("add", '{"a": 2}'),)
    assert found.content == bad.rstrip()


def test_the_closing_tag_may_be_missing() -> None:
    """A call is whole with its object; what follows instead of the closing tag is content."""
    expected = [ToolCallStart(0, "now"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]
    whole = call("now", "{}")
    for length in range(len(whole) - len("\n</tool_call>"), len(whole) + 1):
        assert events(whole[:length]) == expected
    cut = whole.removesuffix("\n</tool_call>")
    assert events(cut + "}\n</tool_call>") == [*expected, ContentDelta("}\n</tool_call>")]
    assert events(cut + "\n" + whole)[3:] == [ToolCallStart(1, "now"), ToolCallArguments(1, "{}"), ToolCallEnd(1)]


def test_a_broken_call_keeps_its_index() -> None:
    """The next call has an index of its own."""
    found = events(BROKEN_OFF[1] + call("now", "{}"))
    assert [event.index for event in found if isinstance(event, ToolCallStart)] == [0, 1]
    assert [event.index for event in found if isinstance(event, ToolCallEnd)] == [1]


def test_time_grows_with_the_length_only() -> None:
    """Long calls and long runs of broken ones are read within the test's time limit."""
    text = call("write_file", json.dumps({"text": "<tool_call>{ " * 5000, "l": [1] * 5000}))
    assert len(collect(read(Parser(TOOLS), text)).tool_calls) == 1
    assert collect(read(Parser(TOOLS), "<tool_call>\n{" * 5000)).tool_calls == ()
