"""Calls as Python writes them: literals of all kinds, lists of calls, and what is none."""

from __future__ import annotations

import ast
import json
import time

import pytest
from hypothesis import given, settings, strategies

from coordinator.text.parsers.collected import CollectedToolCall, collect
from coordinator.text.parsers.events import ToolCallArguments, ToolCallEnd, ToolCallStart
from coordinator.text.parsers.python_literals import NotALiteral, python_to_json
from coordinator.text.parsers.tools.pythonic import Parser
from tests.coordinator.text.parsers.reading import TOOLS, read

ADD = CollectedToolCall("add", '{"a": 1, "b": 2.5}')
NOW = CollectedToolCall("now", "{}")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[add(a=1, b=2.5)]", [ADD]),
        ("\n [ add ( a = 1,b=2.5, ) ]\n", [ADD]),
        ("[add(a=1, b=2.5), now()]", [ADD, NOW]),
        ("[add(a=1, b=2.5)]\n[now()]", [ADD, NOW]),
        ("<|python_start|>[now()]", [NOW]),
        ("[now(), now()", [NOW, NOW]),
        (
            """[write_file(path='it\\'s)', text="a, b]\\n", tags=["x", 'y'], sync=True, owner=None, """
            """meta={"k": (1,)})]""",
            [
                CollectedToolCall(
                    "write_file",
                    '{"path": "it\'s)", "text": "a, b]\\n", "tags": ["x", "y"], "sync": true, "owner": null, '
                    '"meta": {"k": [1]}}',
                )
            ],
        ),
    ],
)
def test_an_answer_of_calls(text: str, calls: list[CollectedToolCall]) -> None:
    """However it was cut; white space, commas and brackets between them are layout."""
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        found = collect(read(Parser(TOOLS), pieces))
        assert (found.content, list(found.tool_calls)) == ("", calls), pieces


def test_arguments_stream() -> None:
    """Name and arguments come as soon as they are certain."""
    parser = Parser(TOOLS)
    assert parser.push("[write_fi") == []
    assert parser.push("le(path='a") == [ToolCallStart(0, "write_file"), ToolCallArguments(0, "{")]
    assert parser.push("', te") == [ToolCallArguments(0, '"path": "a"')]
    assert parser.push("xt='')") == [ToolCallArguments(0, ', "text": ""}'), ToolCallEnd(0)]
    assert parser.push("]") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    "text",
    [
        "Like so: [now()]",
        "[1, 2]",
        "[now]",
        "[unknown()]",
        "[now(1)]",
        "[add(a=1, a=2)]",
        "[add(a=one)]",
        "[add(a=f(1))]",
        "[add(a=1",
        "[add(a='1)]",
        "[add(a=(1]))]",
        "[ [",
        " \n",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    """Text that only looks like a call comes out unchanged."""
    found = collect(read(Parser(TOOLS), text))
    assert (found.content, found.tool_calls) == (text, ())


VALUES = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False, allow_infinity=False)
    | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
    max_leaves=8,
)


@settings(max_examples=20)
@given(VALUES)
def test_what_python_and_json_write_is_read(value: object) -> None:
    """Whole numbers, fractions, words, text and what is made of them, as either of the two writes it."""
    assert json.loads(python_to_json(repr(value))) == value
    assert json.loads(python_to_json(json.dumps(value))) == value


@pytest.mark.parametrize(
    "text", [r"'\x41\u00e9\U0001f389\n\t\\\'\"'", r'"\d\/"', "'a' \"b\"", "(1, (2,), [])", "{}", "-0.5e-3", "'a\\\nb'"]
)
def test_literals_are_those_of_python(text: str) -> None:
    """Escapes, neighbouring strings, and tuples as lists."""
    expected = ast.literal_eval(text.replace(r"\d", r"\\d").replace(r"\/", "/"))
    assert json.loads(python_to_json(text)) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    "text",
    ["", "one", "1 2", "007", "1_000", "[1", "[1 2]", "{1: 2}", "{'a'}", "'a", "b'a'", "1j", "-", "[" * 200, "nan"],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    """Nothing is evaluated, and nesting has an end."""
    with pytest.raises(NotALiteral):
        python_to_json(text)


def test_time_grows_with_the_length_only() -> None:
    """A text of many pieces is looked at once."""
    parser, start = Parser(TOOLS), time.process_time()
    events = parser.push("[write_file(text='")
    for _ in range(20_000):
        events += parser.push("ab, ")
    events += parser.push("')]")
    assert isinstance(events[-1], ToolCallEnd)
    assert time.process_time() - start < 4
