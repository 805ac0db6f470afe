"""Harmony: messages on channels, calls, and what holds for any text, however it was cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from coordinator.text.parsers.collected import CollectedToolCall, collect
from coordinator.text.parsers.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)
from coordinator.text.parsers.tags import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from coordinator.text.parsers.tools.openai import Parser, begun_by
from tests.coordinator.text.parsers.reading import TOOLS, read, split

NEXT = f"{END}{START}assistant"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}They want\n a sum.{NEXT}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}Let me see. {NEXT}"
ADD = '{"a": 1, "b": 2}'
CALLED = CollectedToolCall("add", ADD)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}{CHANNEL}final{MESSAGE}It is 3.{RETURN}", "They want\n a sum.", "It is 3.", []),
        (f"{THOUGHT}{CHANNEL}final{MESSAGE}It is 3.", "They want\n a sum.", "It is 3.", []),
        (
            f"{THOUGHT}{PREAMBLE}{CHANNEL}commentary to=functions.add {CONSTRAIN}json{MESSAGE}{ADD}{CALL}",
            "They want\n a sum.",
            "Let me see. ",
            [CALLED],
        ),
        # As templates show earlier calls: the function stands behind the role.
        (f" to=functions.add{CHANNEL}commentary json{MESSAGE}{ADD}", "", "", [CALLED]),
        (f"{CHANNEL}analysis to=functions.add code{MESSAGE}\n{ADD}\n{CALL}", "", "", [CALLED]),
        (f"{CHANNEL}commentary to=functions.now{MESSAGE}{CALL}", "", "", [CollectedToolCall("now", "{}")]),
        (
            f"{CHANNEL}commentary to=functions.add{MESSAGE}{ADD}{NEXT}{CHANNEL}commentary to=now{MESSAGE}{{}}{CALL}",
            "",
            "",
            [CALLED, CollectedToolCall("now", "{}")],
        ),
        # What is said to tools that nobody offers.
        (f"{CHANNEL}analysis to=python code{MESSAGE}print(1){CALL}", "print(1)", "", []),
        (f"{CHANNEL}commentary to=functions.other{MESSAGE}{{}}{CALL}", "", "{}", []),
        # A call whose arguments are no object.
        (f"{CHANNEL}commentary to=functions.add{MESSAGE}[1]{CALL}", "", "[1]", []),
        (f'{CHANNEL}commentary to=functions.add{MESSAGE}{{"a": 1{CALL}', "", '{"a": 1', []),
        (f"{CHANNEL}commentary to=functions.add{MESSAGE}{ADD} and{CALL}", "", "and", [CALLED]),
        # Without its markers, or with some of them missing.
        ("Hello <b>", "", "Hello <b>", []),
        (" \n", "", " \n", []),
        (
            f"{CHANNEL}final{MESSAGE}a{START}assistant{CHANNEL}final{MESSAGE}b{END}{CHANNEL}analysis{MESSAGE}c",
            "c",
            "ab",
            [],
        ),
    ],
)
def test_an_answer_however_it_is_cut(text: str, reasoning: str, content: str, calls: list[CollectedToolCall]) -> None:
    """Reasoning, content and calls, from the text at once, in two pieces cut anywhere, and letter by letter."""
    whole = read(Parser(TOOLS), [text])
    found = collect(whole)
    assert (found.reasoning, found.content, list(found.tool_calls)) == (reasoning, content, calls)
    for pieces in (list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert read(Parser(TOOLS), pieces) == whole, pieces


def test_all_of_it_streams() -> None:
    """Each piece comes as soon as it is certain."""
    parser = Parser(TOOLS)
    assert parser.push(f"{CHANNEL}analysis{MESSAGE}Th") == [ReasoningDelta("Th")]
    assert parser.push("en<") == [ReasoningDelta("en")]
    assert parser.push(f"{NEXT[1:]}{CHANNEL}commentary to=functions.write_file {CONSTRAIN}json") == []
    assert parser.push(MESSAGE) == [ToolCallStart(0, "write_file")]
    assert parser.push('{"text": "a') == [ToolCallArguments(0, '{"text": "a')]
    assert parser.push('b"}') == [ToolCallArguments(0, 'b"}'), ToolCallEnd(0)]
    assert parser.push(CALL) == []
    assert parser.finish() == []


def test_an_answer_that_the_prompt_has_begun() -> None:
    """It goes on in the message that the prompt ends with."""
    prompt = f"{START}user{MESSAGE}Hi{END}{START}assistant"
    assert begun_by(prompt) == "assistant"
    assert read(Parser(TOOLS, begun_by(prompt)), "Hello") == [ContentDelta("Hello")]
    begun = begun_by(f"{prompt}{CHANNEL}final{MESSAGE}Good")
    assert read(Parser(TOOLS, begun), f" day{RETURN}") == [ContentDelta(" day")]


def test_without_tools_calls_are_content() -> None:
    """What is said to a function that nobody offers is no call, and the rest is read as always."""
    text = f"{THOUGHT}{CHANNEL}commentary to=functions.add{MESSAGE}{ADD}{CALL}"
    assert read(Parser([]), [text]) == [ReasoningDelta("They want\n a sum."), ContentDelta(ADD)]


def random_answer(rng: random.Random) -> tuple[str, str, str, list[tuple[str, dict[str, Any]]]]:
    """Messages in any order, and what they hold."""
    words = ["a", " ", "\n", "<", "<|", "{", "}", '"', "ü", "analysis", "to=functions.add"]
    parts, reasoning, content, calls = [], "", "", []
    for _ in range(rng.randint(1, 4)):
        text = "".join(rng.choices(words, k=rng.randint(0, 5))).rstrip("<|")
        match rng.randint(0, 3):
            case 0:
                parts.append(f"{CHANNEL}analysis{MESSAGE}{text}")
                reasoning += text
            case 1:
                parts.append(f"{CHANNEL}{rng.choice(['final', 'commentary'])}{MESSAGE}{text}")
                content += text
            case _:
                arguments = {"text": text, "meta": {text: [rng.randint(-9, 9), None]}}
                calls.append(("write_file", arguments))
                header = rng.choice(
                    [" to=functions.write_file{0}commentary json", "{0}commentary to=write_file {1}json"]
                )
                written = json.dumps(arguments, ensure_ascii=False)
                parts.append(f"{header.format(CHANNEL, CONSTRAIN)}{MESSAGE}{written}")
    return NEXT.join(parts) + rng.choice([CALL, RETURN, ""]), reasoning, content, calls


def test_messages_in_any_order() -> None:
    """Everything comes back, however the text is cut."""
    rng = random.Random(3)
    for _ in range(300):
        text, reasoning, content, calls = random_answer(rng)
        found = collect(read(Parser(TOOLS), split(text, rng)))
        assert (found.reasoning, found.content) == (reasoning, content), text
        assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == calls


@settings(max_examples=3)
@given(seed=strategies.integers(0, 2**32))
def test_an_answer_that_its_length_ends_anywhere_shows_no_markup(seed: int) -> None:
    """Of each text and call there is the beginning, and nothing of a marker or header."""
    rng = random.Random(seed)
    text, reasoning, content, calls = random_answer(rng)
    for end in range(len(text) + 1):
        events = read(Parser(TOOLS), [text[:end]], cut=True)
        assert read(Parser(TOOLS), split(text[:end], rng), cut=True) == events
        found = collect(events)
        assert reasoning.startswith(found.reasoning)
        assert content.startswith(found.content)
        cut = [event.index for event in events if isinstance(event, ToolCallCut)]
        assert cut in ([], [len(found.tool_calls) - 1])
        for call, (name, arguments) in zip(found.tool_calls, calls, strict=False):
            assert call.name == name
            assert json.dumps(arguments, ensure_ascii=False).startswith(call.arguments)


def test_nothing_raises() -> None:
    """Markers and texts in any order are read alike however they are cut, and whole calls have JSON objects."""
    tags = [START, "assistant", CHANNEL, "analysis", "commentary", " to=functions.now", MESSAGE, END, CALL, RETURN]
    tags += ["{}", '{"a"', "x", " ", "<", CONSTRAIN]
    rng, calls = random.Random(5), 0
    for _ in range(1500):
        text = "".join(rng.choices(tags, k=rng.randint(0, 14)))
        whole = read(Parser(TOOLS), [text])
        assert read(Parser(TOOLS), split(text, rng)) == whole, text
        for call in collect(whole).tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
            calls += 1
    assert calls > 5
