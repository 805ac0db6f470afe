"""Calls as nested tags: what is one, what isn't, what values mean, and when each piece is known."""

import json

import pytest

from coordinator.text.parsers.collected import CollectedToolCall, collect
from coordinator.text.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from coordinator.text.parsers.tools.qwen3_xml import Parser
from tests.coordinator.text.parsers.reading import TOOLS, read


def call(name: str, **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def events(text: str) -> list[Event]:
    return read(Parser(TOOLS), [text])


def arguments(text: str) -> object:
    (found,) = collect(events(text)).tool_calls
    return json.loads(found.arguments)


VALUES = [
    # argument, its text, what it means
    ("path", "a.txt", "a.txt"),
    ("path", "", ""),
    ("path", "42", "42"),
    ("path", "null", "null"),
    ("path", '{"a": 1}', '{"a": 1}'),
    ("text", "\none\n\n  two\t\n", "\none\n\n  two\t\n"),
    ("text", 'He said "ü 語 🎉" \\ \x07', 'He said "ü 語 🎉" \\ \x07'),
    ("text", "{ nested { braces } ]", "{ nested { braces } ]"),
    ("text", "</tool_call>", "</tool_call>"),
    ("text", "a </parameter> b </function> c", "a </parameter> b </function> c"),
    ("text", "<tool_call>\n<function=now>\n", "<tool_call>\n<function=now>\n"),
    ("text", "</parameter", "</parameter"),
    ("text", "<parameter=x>\n1", "<parameter=x>\n1"),
    ("mode", "append", "append"),
    ("sync", "true", True),
    ("sync", "False", False),
    ("sync", "maybe", "maybe"),
    ("tags", '["a", "</parameter>"]', ["a", "</parameter>"]),
    ("tags", "[\n  1\n]", [1]),
    ("tags", "a, b", "a, b"),
    ("meta", '{"x": {"y": []}}', {"x": {"y": []}}),
    ("meta", '{"x": NaN}', '{"x": NaN}'),
    ("meta", "[" * 50_000 + "]" * 50_000, "[" * 50_000 + "]" * 50_000),
    ("owner", "None", None),
    ("owner", "null", None),
    ("owner", "Ann", "Ann"),
    ("owner", "7", "7"),
    ("size", "12", 12),
    ("size", "None", None),
    ("size", "big", "big"),
    ("size", "1" * 5000, "1" * 5000),
    ("other", "12", 12),
    ("other", '"12"', '"12"'),
    ("other", "some text", "some text"),
    ("undeclared", "[1]", [1]),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_by_the_schema(key: str, text: str, value: object) -> None:
    """A value is read as the type that the tool's schema allows."""
    assert arguments(call("write_file", **{key: text})) == {key: value}


def test_numbers_keep_all_their_digits() -> None:
    """Numbers are passed on as they were written, not rounded."""
    text = call("add", a="123456789012345678901", b="0.10000000000000000001")
    assert collect(events(text)).tool_calls == (
        CollectedToolCall("add", '{"a": 123456789012345678901, "b": 0.10000000000000000001}'),
    )


def test_text_around_and_several_calls() -> None:
    """Text and calls come in their order, without the white space between them."""
    text = f"Let me see.\n\n{call('now')}\n{call('add', a='1', b='-2.5')}\nDone.\n"
    expected = [
        ContentDelta("Let me see."),
        ToolCallStart(0, "now"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
        ToolCallStart(1, "add"),
        ToolCallArguments(1, '{"a": 1, "b": -2.5}'),
        ToolCallEnd(1),
        ContentDelta("Done.\n"),
    ]
    assert events(text) == expected
    for cut in range(1, len(text)):
        assert read(Parser(TOOLS), [text[:cut], text[cut:]]) == expected


def test_texts_stream_and_other_values_come_whole() -> None:
    """Strings come piece by piece, other values when their type is known."""
    parser = Parser(TOOLS)
    assert parser.push("<tool_call>\n<function=write_file") == []
    assert parser.push(">\n<param") == [ToolCallStart(0, "write_file"), ToolCallArguments(0, "{")]
    assert parser.push("eter=text>") == [ToolCallArguments(0, '"text": "')]
    assert parser.push('\n"a\n') == [ToolCallArguments(0, '\\"a')]
    assert parser.push("</parameter> b</para") == [ToolCallArguments(0, "\\n</parameter> b")]
    assert parser.push("meter>\n") == []
    assert parser.push("<parameter=tags>\n[1,") == [ToolCallArguments(0, '", "tags": ')]
    assert parser.push(" 2]\n</parameter>\n</func") == []
    assert parser.push("tion>") == [ToolCallArguments(0, "[1, 2]}"), ToolCallEnd(0)]
    assert parser.finish() == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>",
        "<tool_call>\n\n<function=add>\n\n<parameter=a>\n1</parameter>\n\n<parameter=b>2\n</parameter></function>",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_",
    ],
)
def test_other_layouts(text: str) -> None:
    """White space, a missing outer tag and a missing closing tag don't matter."""
    assert events(text) == [ToolCallStart(0, "add"), ToolCallArguments(0, '{"a": 1, "b": 2}'), ToolCallEnd(0)]


NO_CALLS = [
    "no call at all  \n",
    "<tool_call>",
    "a <func",
    "<function=",
    "<function=unknown>\n</function>",
    "x\n<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n",
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "<tool_call>\n<function=now",
    "<tool_call>\n<function=now\n>\n</function>\n</tool_call>",
]
BROKEN_OFF = [
    "<tool_call>\n<function=now>\n",
    "<tool_call>\n<function=now>\nplease\n</function>\n</tool_call>",
    "<tool_call>\n<function=add>\n<parameter=a>\n1",
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n",
    "Hm. \n<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
    "<tool_call>\n<function=write_file>\n<parameter=text>\none\n</function>\n</tool_call>\n",
    "<tool_call>\n<function=add>\n<parameter=a\n>1</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=add>\n<parameter=a>1</parameter><parameter=a>2</parameter></function>\n</tool_call>",
]


@pytest.mark.parametrize("text", [*NO_CALLS, *BROKEN_OFF])
def test_what_is_no_call_is_content(text: str) -> None:
    """Text that only looks like a call comes out unchanged."""
    found = events(text)
    assert (collect(found).content, collect(found).tool_calls) == (text, ())
    assert read(Parser(TOOLS), text) == found
    assert any(isinstance(event, ToolCallStart) for event in found) == (text in BROKEN_OFF)


@pytest.mark.parametrize("bad", [text for text in [*NO_CALLS, *BROKEN_OFF] if text.endswith(("_call>", "_call>\n"))])
def test_a_good_call_behind_a_bad_one_is_found(bad: str) -> None:
    """Reading goes on where the bad call was broken off."""
    found = collect(events(f"{bad}\n{call('add', a='2')}"))
    assert found.tool_calls == (CollectedToolCall("add", '{"a": 2}'),)
    assert found.content == bad.rstrip()


def test_time_grows_with_the_length_only() -> None:
    """Long calls and long runs of broken ones are read within the test's time limit."""
    text = call("write_file", text="</parameter> </function> \n" * 5000, tags="[" + "1, " * 5000 + "1]")
    assert len(collect(read(Parser(TOOLS), text)).tool_calls) == 1
    assert collect(read(Parser(TOOLS), "<tool_call>\n<function=add>\n<parameter=a>\n" * 2000)).tool_calls == ()
