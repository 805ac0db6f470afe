"""Feeding parsers in the tests, and what makes two streams of events the same."""

import random
from collections.abc import Iterable
from typing import Protocol

from coordinator.text.parsers.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
WRITE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "mode": {"enum": ["new", "append"]},
                "sync": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "meta": {"type": "object"},
                "owner": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "size": {"$ref": "#/$defs/size"},
                "other": {},
            },
            "required": ["path", "text"],
            "$defs": {"size": {"type": ["integer", "null"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [ADD, WRITE, NOW]


class Parser(Protocol):
    def push(self, text: str) -> list[Event]: ...
    def finish(self, *, cut: bool = False) -> list[Event]: ...


def read(parser: Parser, pieces: Iterable[str], *, cut: bool = False) -> list[Event]:
    """All events, pieces of the same thing joined. cut: the answer's length ended the text."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(cut=cut)
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case ToolCallArguments(index, text), ToolCallArguments(same, more) if index == same:
                merged[-1] = ToolCallArguments(index, text + more)
            case ContentDelta(text), ContentDelta(more):
                merged[-1] = ContentDelta(text + more)
            case ReasoningDelta(text), ReasoningDelta(more):
                merged[-1] = ReasoningDelta(text + more)
            case _:
                merged.append(event)
    return merged


def split(text: str, rng: random.Random, longest: int = 7) -> list[str]:
    """The text in random pieces, empty ones among them."""
    pieces = []
    while text:
        size = rng.randint(0, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces
