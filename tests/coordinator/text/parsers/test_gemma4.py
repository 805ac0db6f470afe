"""Calls as Gemma 4 writes them: values of all types, several calls, what is none, and reasoning on its channel."""

from __future__ import annotations

import pytest

from coordinator.text.parsers.collected import Collected, CollectedToolCall, collect
from coordinator.text.parsers.events import ToolCallArguments, ToolCallEnd, ToolCallStart
from coordinator.text.parsers.pipeline import OutputParser
from coordinator.text.parsers.reasoning import OF_GEMMA, Opening, ReasoningParser, opening_of, tags_in
from coordinator.text.parsers.tools.gemma4 import Parser
from tests.coordinator.text.parsers.reading import TOOLS, read

ADD = "<|tool_call>call:add{a:1,b:-2.5}<tool_call|>"
CALLED = CollectedToolCall("add", '{"a": 1, "b": -2.5}')


def write(arguments: str) -> str:
    return f"<|tool_call>call:write_file{{{arguments}}}<tool_call|>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            'path:<|"|>a.txt<|"|>,text:<|"|>two, {or} so:\n"é"<|"|>',
            '{"path": "a.txt", "text": "two, {or} so:\\n\\"é\\""}',
        ),
        ('path:<|"|><|"|>,sync:true', '{"path": "", "sync": true}'),
        ('tags:[<|"|>x<|"|>,<|"|>y z<|"|>],meta:{x:{y:[1,null,[]]},<|"|>z z<|"|>:{}}', None),
        ("size:null,owner:null,other:1e5", '{"size": null, "owner": null, "other": 1e5}'),
        ("sync:True,size:None", '{"sync": true, "size": null}'),
        ("path:a.txt, text : plain words ", '{"path": "a.txt", "text": "plain words"}'),
        ("", "{}"),
        (" ", "{}"),
    ],
)
def test_arguments_become_json(text: str, arguments: str | None) -> None:
    """However they are cut. What stands without marks is JSON where the schema allows its type, and else a text."""
    arguments = arguments or '{"tags": ["x", "y z"], "meta": {"x": {"y": [1, null, []]}, "z z": {}}}'
    call = write(text)
    for pieces in ([call], list(call), *([call[:cut], call[cut:]] for cut in range(len(call)))):
        assert collect(read(Parser(TOOLS), pieces)) == Collected("", "", (CollectedToolCall("write_file", arguments),))


def test_arguments_stream() -> None:
    """Name and texts come as soon as they are certain, other values once they are whole."""
    parser = Parser(TOOLS)
    assert parser.push("Now: <|tool_") != []
    assert parser.push("call>call:write_file") == []
    assert parser.push('{text:<|"|>ab') == [ToolCallStart(0, "write_file"), ToolCallArguments(0, '{"text": "ab')]
    assert parser.push('c<|"') == [ToolCallArguments(0, "c")]
    assert parser.push("|>,sync:tr") == [ToolCallArguments(0, '", "sync": ')]
    assert parser.push("ue}<tool_call|>") == [ToolCallArguments(0, "true}"), ToolCallEnd(0)]
    assert parser.finish() == []


def test_several_calls_and_text_around_them() -> None:
    """Calls follow each other without anything between."""
    found = collect(read(Parser(TOOLS), f"First this.{ADD}{ADD}\n{ADD} Done."))
    assert (found.content, found.tool_calls) == ("First this.Done.", (CALLED,) * 3)


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>call:unknown{}<tool_call|>",
        "<|tool_call>add{a:1}<tool_call|>",
        '<|tool_call>call:add{"a": 1}<tool_call|>',
        "<|tool_call>call:add{a:}<tool_call|>",
        "<|tool_call>call:add{a:1,a:2}<tool_call|>",
        "<|tool_call>call:add{a:1 {b:2}}<tool_call|>",
        "<|tool_call>call:add{{a:1}}<tool_call|>",
        "<|tool_call>call:add{a:1<tool_call|>",
        "call:add{a:1}",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    """Not a character of it is lost, and a good call behind it is found."""
    found = collect(read(Parser(TOOLS), text))
    assert (found.content, found.tool_calls) == (text, ())
    assert collect(read(Parser(TOOLS), text + "." + ADD)).tool_calls == (CALLED,)


def test_reasoning_stands_on_its_channel() -> None:
    """A template switches it off by an empty block in the prompt; what was in earlier turns does not count."""
    answer = f"<|channel>thought\nTwo numbers.\n<channel|>The sum:{ADD}"
    for pieces in ([answer], list(answer)):
        found = collect(read(OutputParser(ReasoningParser(tags=OF_GEMMA), Parser(TOOLS)), pieces))
        assert found == Collected("Two numbers.", "The sum:", (CALLED,))
    turn = "<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert opening_of(turn, OF_GEMMA) is Opening.UNDECIDED
    assert opening_of(turn + "<|channel>thought\n<channel|>", OF_GEMMA) is Opening.CLOSED
    assert opening_of(turn + "<|channel>thought\n", OF_GEMMA) is Opening.INSIDE
    assert opening_of(f"{turn}<|channel>thought\n<channel|>Hi<turn|>\n{turn}", OF_GEMMA) is Opening.UNDECIDED
    assert tags_in("{{- '<|channel>thought\n' + text -}}") is OF_GEMMA
