"""What holds for any text: rendered calls come back, cuts don't matter, nothing raises, no text is lost."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.parsers.collected import Collected, CollectedToolCall, collect
from coordinator.text.parsers.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)
from coordinator.text.parsers.pipeline import OutputParser
from coordinator.text.parsers.reasoning import OF_GEMMA, TAGGED, ReasoningParser
from coordinator.text.parsers.tools import new_parser
from tests.coordinator.text.parsers.reading import TOOLS, read, split

# How the two families' templates write an assistant's turn, in as few words as do it.
TEMPLATES = {
    "gemma4": """
{%- macro written(value) %}
    {%- if value is string %}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is mapping %}{{- '{' -}}
        {%- for key, inner in value.items() %}{{- ',' if not loop.first }}{{- '<|"|>' + key + '<|"|>:' -}}
            {{- written(inner) }}{% endfor %}
        {{- '}' -}}
    {%- elif value is sequence %}{{- '[' -}}
        {%- for inner in value %}{{- ',' if not loop.first }}{{- written(inner) }}{% endfor %}{{- ']' -}}
    {%- else %}{{- value | tojson }}{% endif %}
{%- endmacro %}
{%- for m in messages %}
    {%- if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- ',' if not loop.first }}{{- key + ':' }}{{- written(value) }}
        {%- endfor %}
        {{- '}<tool_call|>' }}
    {%- endfor %}
{%- endfor %}""",
    "glm45": """
{%- for m in messages %}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {{- '\n<tool_call>' + call.function.name + '\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
            {{- value if value is string else value | tojson }}
            {{- '</arg_value>\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}""",
    "hermes": """
{%- for m in messages %}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}""",
    "llama3_json": """
{%- for m in messages %}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {%- if not loop.first %}{{ '; ' }}{% elif m.content %}{{ '\n<|python_tag|>' }}{% endif %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}' }}
    {%- endfor %}
{%- endfor %}""",
    "pythonic": """
{%- for m in messages %}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {%- if loop.first and m.content %}{{ '<|python_start|>' }}{% endif %}
        {{- '[' if loop.first else ', ' }}
        {{- call.function.name + '(' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- key + '=' + value | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ')' }}{{ ']' if loop.last }}
    {%- endfor %}
{%- endfor %}""",
    "qwen3_xml": """
{%- for m in messages %}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {%- if loop.first and m.content %}{{ '\n\n' }}{% elif not loop.first %}{{ '\n' }}{% endif %}
        {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<parameter=' + key + '>\n' }}
            {%- if value is string %}{{ value }}
            {%- elif value is mapping or value is sequence %}{{ value | tojson }}
            {%- else %}{{ value | string }}
            {%- endif %}
            {{- '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}""",
}
FORMATS = sorted(TEMPLATES)
TURNS, TEXTS = 120, 600
SLOW = ("gemma4", "glm45", "llama3_json", "pythonic")
WORDS = [
    "a",
    " ",
    "\n",
    '"',
    "\\",
    "{",
    "}",
    "<",
    "</tool_call>",
    "<tool_call>",
    "ü",
    "🎉",
    "</parameter>",
    "1",
    "True",
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 6)))


def random_turn(rng: random.Random) -> dict[str, Any]:
    """An assistant's turn whose calls fit the tools."""
    plain = [word for word in WORDS if "<" not in word]
    values = {
        "path": random_text(rng),
        "text": random_text(rng),
        "mode": rng.choice(["new", "append"]),
        "sync": rng.random() < 0.5,
        "tags": [random_text(rng) for _ in range(rng.randint(0, 3))],
        "meta": {random_text(rng): [rng.randint(-9, 9), None, random_text(rng)]},
        "owner": rng.choice([None, "Ann"]),
        "size": rng.choice([None, 7]),
    }
    chosen = rng.sample(sorted(values), rng.randint(0, len(values)))
    calls = [
        ("write_file", {key: values[key] for key in chosen}),
        ("add", {"a": rng.randint(-99, 99), "b": rng.uniform(-1e30, 1e30)}),
        ("now", {}),
    ]
    return {
        "role": "assistant",
        "reasoning_content": "".join(rng.choices(plain, k=3)).strip("\n") + rng.choice(["", ".<tool_call>\n{}."]),
        "content": "".join(rng.choices(plain, k=4)).strip(),
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in rng.choices(calls, k=rng.randint(0, 3))
        ],
    }


def parser(name: str) -> OutputParser:
    tags = OF_GEMMA if name == "gemma4" else TAGGED
    return OutputParser(ReasoningParser(tags=tags), new_parser(name, TOOLS))


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_renders_is_read_back(name: str) -> None:
    """Reasoning, text and calls of a rendered turn come back as they were."""
    rng = random.Random(name)
    template = ChatTemplate(TEMPLATES[name])
    calls = 0
    for _ in range(TURNS):
        turn = random_turn(rng)
        found = collect(read(parser(name), split(template.render([turn]), rng)))
        assert found.reasoning == turn["reasoning_content"]
        assert found.content == turn["content"]
        assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]
        ]
        calls += len(found.tool_calls)
    assert calls > TURNS


def mutated(text: str, rng: random.Random) -> str:
    """A good output with some of it cut, doubled, moved or replaced."""
    for _ in range(rng.randint(0, 3)):
        at, length = rng.randint(0, len(text)), rng.choice([1, 1, 3, 12, 40])
        piece = rng.choice(["", text[at : at + length] * 2, rng.choice(WORDS), text[:length]])
        text = text[:at] + piece + text[at + length * rng.randint(0, 1) :]
    return text[: rng.randint(0, len(text))] if rng.random() < 0.3 else text


@pytest.mark.parametrize("texts", [50, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_cuts_do_not_matter_and_nothing_raises(name: str, texts: int) -> None:
    """Spoiled text is read alike however it is cut, and never raises."""
    rng = random.Random(name + "mutated")
    template = ChatTemplate(TEMPLATES[name])
    for _ in range(min(texts, 100) if name in ("glm45", "pythonic") else texts):
        text = mutated(template.render([random_turn(rng)]), rng)
        whole = read(parser(name), [text])
        for longest in (1, 4, 30):
            assert read(parser(name), split(text, rng, longest)) == whole, text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FORMATS]
)
@pytest.mark.parametrize(("turns", "cuts"), [(8, 40), pytest.param(40, None, marks=pytest.mark.slow)])
def test_a_turn_that_is_cut_anywhere_never_shows_markup(name: str, turns: int, cuts: int | None) -> None:
    """Wherever the length ends a turn, its text and calls so far are there, and nothing of a tag is text. By default
    so many places of a turn are tried, drawn at random.

    Only the last call may be a part, and its arguments begin as the whole ones do. In pieces it is read alike.
    """

    @settings(max_examples=turns)
    @given(seed=strategies.integers(0, 2**32))
    def check(seed: int) -> None:
        check_cuts(name, seed, cuts)

    check()


def check_cuts(name: str, seed: int, cuts: int | None) -> None:
    rng = random.Random(seed)
    turn = random_turn(rng)
    turn["content"] = turn["content"].replace("<", "")
    text = ChatTemplate(TEMPLATES[name]).render([turn])
    whole = collect(read(parser(name), [text]))
    ends = range(len(text) + 1)
    for end in ends if cuts is None else rng.sample(ends, min(cuts, len(ends))):
        events = read(parser(name), [text[:end]], cut=True)
        assert read(parser(name), split(text[:end], rng), cut=True) == events
        found = collect(events)
        assert whole.content.startswith(found.content.rstrip())
        assert whole.reasoning.startswith(found.reasoning.rstrip())
        assert len(found.tool_calls) == sum(isinstance(event, ToolCallStart) for event in events)
        cut = [event.index for event in events if isinstance(event, ToolCallCut)]
        assert cut in ([], [len(found.tool_calls) - 1])
        *done, last = found.tool_calls or (None,)
        assert tuple(done) == whole.tool_calls[: len(done)]
        if last is not None:
            same = whole.tool_calls[len(done)]
            assert last.name == same.name
            assert same.arguments.startswith(last.arguments)
            assert cut or last == same


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_is_lost_and_whole_calls_are_json(name: str) -> None:
    """All text comes out as content or as calls whose arguments are JSON objects."""
    rng = random.Random(name + "lost")
    template = ChatTemplate(TEMPLATES[name])
    broken = 0
    for _ in range(300):
        turn = {**random_turn(rng), "reasoning_content": ""}
        text = mutated(template.render([turn]), rng)
        events = read(new_parser(name, TOOLS), [text])
        found = collect(events)
        for call in found.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
        rest = iter(text)
        assert all(char in rest for char in found.content), text  # content is a part of the text, in its order
        if not found.tool_calls:
            assert found.content == text
        started = [event.index for event in events if isinstance(event, ToolCallStart)]
        assert started == [*range(len(started))]
        broken += len(started) - len(found.tool_calls)
    assert broken > 25


@pytest.mark.parametrize("name", FORMATS)
def test_random_tags_in_any_order(name: str) -> None:
    """No order of tags raises, loses text or makes a call that has no end."""
    tags = [
        *["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=text>"],
        *["</parameter>", '{"name": "now", "arguments": {}}', '{"name": "add"', "\n", " ", "x", "<", "</", "}"],
        *["<tool_call>now", "[now()]", ", now()]", "<arg_key>", "</arg_value>"],
    ]
    if name == "gemma4":
        tags = ["<|tool_call>", "<tool_call|>", "call:now{", "call:add{a:", '<|"|>', "<|channel>thought", "<channel|>"]
        tags += ["<|tool_call>call:now{", "\n", " ", "x", "<", "1", ",", "b:", "{", "}", "}"]
    rng = random.Random(name + "tags")
    calls = 0
    for _ in range(TEXTS):
        text = "".join(rng.choices(tags, k=rng.randint(0, 14)))
        whole = read(parser(name), [text])
        assert read(parser(name), split(text, rng)) == whole, text
        calls += sum(isinstance(event, ToolCallEnd) for event in whole)
    assert calls > TEXTS / 75


def test_a_call_in_the_reasoning_is_none() -> None:
    """What a model considers while it thinks is not called."""
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    expected = [
        ReasoningDelta(f"Shall I?\n{call}"),
        ContentDelta("So be it."),
        ToolCallStart(0, "now"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
    ]
    text = f"Shall I?\n{call}\n</think>\n\nSo be it.\n{call}"
    for pieces in ([text], text):
        assert read(OutputParser(ReasoningParser(inside=True), new_parser("hermes", TOOLS)), pieces) == expected
    unclosed = f"Shall I?\n{call}"
    assert read(OutputParser(ReasoningParser(inside=True), new_parser("hermes", TOOLS)), unclosed) == [
        ReasoningDelta(unclosed)
    ]


def test_a_call_that_was_broken_off_is_content_only() -> None:
    """Its text is content, and the call after it is found."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1,'
    events = read(new_parser("hermes", TOOLS), [text + "}", "}"])
    assert events[:2] == [ToolCallStart(0, "add"), ToolCallArguments(0, '{"a": 1,')]
    assert collect(events) == Collected("", text + "}}", ())
    good = [ToolCallStart(1, "now"), ToolCallArguments(1, "{}"), ToolCallEnd(1)]
    assert collect([*events, *good]) == Collected("", text + "}}", (CollectedToolCall("now", "{}"),))
