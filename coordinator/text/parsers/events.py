"""The events by which the parsers pass on an answer, piece by piece.

A call is one `ToolCallStart`, any number of `ToolCallArguments`, whose texts joined are its arguments as a JSON object,
and one `ToolCallEnd`. One that the answer's length cut ends with `ToolCallCut` instead, and its arguments are the
beginning of such an object. A call with neither was broken off: its text follows as content, unchanged and whole, and
its earlier events are to be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a known function begins. Indices count up from 0 and include broken calls."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments, as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is whole and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """The answer may not be longer, and ends in the middle of the call."""

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallCut
