"""Harmony, the format of gpt-oss: an answer is one message or several, each with a header that says where it goes.

    <|channel|>analysis<|message|>They want a sum.<|end|><|start|>assistant<|channel|>commentary to=functions.add
    <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>

What is on the channel `analysis` is reasoning, and what is said to a function that there is, on any channel, is a call
of it. All else is content: the answer on `final`, and on `commentary` what comes before calls. The markers are special
tokens, so an answer's text must have them. An answer that does not begin with one is content up to the first marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto

from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)
from coordinator.text.parsers.held_text import HeldTextParser
from coordinator.text.parsers.json_scanner import JsonScanner
from coordinator.text.parsers.lark import json_schema, literal
from coordinator.text.parsers.tags import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    WHITESPACE,
    skip_whitespace,
    unfinished,
)
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema, read_tools

_ENDINGS = (END, CALL, RETURN, START)
_BEGINNINGS = (CHANNEL, MESSAGE, START, "to=")
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _Part(Enum):
    BEGINNING = auto()
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    LAYOUT = auto()  # behind a message, or behind the arguments of a call


class Parser(HeldTextParser):
    """Finds the reasoning, the content and the calls of one answer."""

    def __init__(self, tools: Sequence[ToolSchema], begun: str = "") -> None:
        """begun: what the prompt has of the answer's message, behind the marker of its start."""
        super().__init__()
        self._tools = read_tools(tools)
        self._part = _Part.BEGINNING
        self._index = 0
        self._scanner = JsonScanner()
        self._call: list[str] = []  # what was read of its arguments
        if CHANNEL in begun or MESSAGE in begun:
            self._part = _Part.HEADER
            self.push(begun)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """See `ToolParser`."""
        if self._part is _Part.CALL:
            self._finish_call(cut)
        elif not cut:
            self._add(self._held.strip(WHITESPACE) if self._part is _Part.LAYOUT else self._held)
        # What is held otherwise is a header, or may have become a marker.
        self._held, self._part = "", _Part.LAYOUT
        return self._take_events()

    def _finish_call(self, cut: bool) -> None:
        if cut:
            self._events.append(ToolCallCut(self._index))
        else:
            self._call.append(self._held)
            self._end_call() if self._is_without_arguments else self._give_up()

    def _go_on(self) -> bool:
        match self._part:
            case _Part.BEGINNING:
                return self._begin(_BEGINNINGS)
            case _Part.LAYOUT:
                return self._begin((*_ENDINGS, CHANNEL))
            case _Part.HEADER:
                return self._read_header()
            case _Part.CALL:
                return self._read_call()
        return self._read_text()

    def _begin(self, tags: Sequence[str]) -> bool:
        """Read up to what begins a header, which may be one of these tags, or text."""
        start = skip_whitespace(self._held, 0)
        tag = next((tag for tag in tags if self._held.startswith(tag, start)), None)
        if tag is None:
            if any(other.startswith(self._held[start:]) for other in tags):
                return False
            self._held = self._held[start:] if self._part is _Part.LAYOUT else self._held
            self._part = _Part.CONTENT
        elif tag in (END, CALL, RETURN):
            self._held = self._held[start + len(tag) :]
            self._part = _Part.LAYOUT
        else:
            self._held = self._held[start:].removeprefix(START)
            self._part = _Part.HEADER
        return True

    def _read_header(self) -> bool:
        header, marker, rest = self._held.partition(MESSAGE)
        if not marker:
            return False
        self._held = rest
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if name in self._tools:
            self._part, self._scanner, self._call = _Part.CALL, JsonScanner(), []
            self._events.append(ToolCallStart(self._index, name))
        else:
            channel = header.partition(CHANNEL)[2].lstrip(WHITESPACE)
            self._part = _Part.REASONING if channel.startswith("analysis") else _Part.CONTENT
        return True

    def _text_end(self) -> int:
        """Return up to where the held text surely has no marker that ends a message."""
        found = [at for tag in _ENDINGS if (at := self._held.find(tag)) >= 0]
        return min(found, default=len(self._held) - unfinished(self._held, *_ENDINGS))

    def _read_text(self) -> bool:
        end = self._text_end()
        self._add(self._held[:end])
        self._held = self._held[end:]
        if not any(map(self._held.startswith, _ENDINGS)):
            return False
        self._part = _Part.LAYOUT
        return True

    def _read_call(self) -> bool:
        text, position, pieces = self._held[: self._text_end()], 0, []
        if not self._scanner.depth:
            position = skip_whitespace(text, 0)
        is_json = position == len(text) or self._scanner.depth > 0 or text[position] == "{"
        while is_json and position < len(text):
            end = self._scanner.step(text, position)
            is_json = end >= 0
            if is_json:
                pieces.append(text[position:end])
                position = end
                if not self._scanner.depth:
                    break
        arguments = "".join(pieces)
        self._call.append(text[:position])
        self._held = self._held[position:]
        if arguments:
            self._events.append(ToolCallArguments(self._index, arguments))
        if arguments and is_json and not self._scanner.depth:
            self._end_call()
            return True
        if is_json and not any(map(self._held.startswith, _ENDINGS)):
            return False
        self._end_call() if is_json and self._is_without_arguments else self._give_up()
        return True

    @property
    def _is_without_arguments(self) -> bool:
        return not "".join(self._call).strip(WHITESPACE)

    def _end_call(self) -> None:
        if self._is_without_arguments:
            self._events.append(ToolCallArguments(self._index, "{}"))
        self._events.append(ToolCallEnd(self._index))
        self._index += 1
        self._part = _Part.LAYOUT

    def _give_up(self) -> None:
        """Make content of a call that turned out to be none."""
        self._index += 1
        self._part = _Part.CONTENT
        self._add("".join(self._call))

    def _add(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text) if self._part is _Part.REASONING else ContentDelta(text))


def is_taught_by(template: str) -> bool:
    """Return whether the template writes messages with its markers."""
    return CHANNEL in template and MESSAGE in template


def begun_by(prompt: str) -> str:
    """Return what a prompt has of the answer's message, behind the last marker of a message's start."""
    return prompt.rpartition(START)[2]


def framing_grammar(tag: Callable[[str], str], *, begun: bool) -> list[str]:
    """Return the Lark lines whose `before` is what may come before the message that counts: reasoning, once.

    begun: whether the prompt has begun another message, which ends first.
    """
    if begun:
        return [f'before: {tag(END)} {tag(START)} "assistant"']
    # A marker that is one token is not matched by text.
    is_token = tag(END) == END
    text = f"/(?s:.*)/ {END}" if is_token else "/(?s:.*)<\\|end\\|>/"
    return [
        f'before: ({tag(CHANNEL)} "analysis" {tag(MESSAGE)} analysis {tag(START)} "assistant")?',
        f"analysis{'' if is_token else '[lazy]'}: {text}",
    ]


def final_grammar(tag: Callable[[str], str]) -> str:
    """Return the term for the header of the message that answers."""
    return f'{tag(CHANNEL)} "final" {tag(MESSAGE)}'


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Return the Lark lines whose `rule` is one call of the tool."""
    recipient = literal(f"commentary to={_FUNCTIONS}{tool.name} ")
    return [
        f'{rule}: {tag(CHANNEL)} {recipient} {tag(CONSTRAIN)} "json" {tag(MESSAGE)} {rule}_arguments',
        f"{rule}_arguments: {json_schema({**tool.parameters, 'type': 'object'})}",
    ]
