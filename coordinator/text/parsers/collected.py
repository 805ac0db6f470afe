"""Puts a whole answer together from its events, for clients that don't stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class CollectedToolCall:
    """A call; `arguments` is the text of a JSON object, of a call that was cut its beginning."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What all events of an answer add up to; the text of broken calls is in `content`."""

    reasoning: str
    content: str
    tool_calls: tuple[CollectedToolCall, ...]


def collect(events: Iterable[Event]) -> Collected:
    """Return what the events of an answer add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    arguments: list[str] = []
    calls: list[CollectedToolCall] = []
    name = ""
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                name, arguments = event.name, []
            case ToolCallArguments():
                arguments.append(event.text)
            case ToolCallEnd() | ToolCallCut():
                calls.append(CollectedToolCall(name, "".join(arguments)))
    return Collected("".join(reasoning), "".join(content), tuple(calls))
