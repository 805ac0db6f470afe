"""Finds calls that are written between tags in the middle of text; formats of that kind share this.

White space between text and a call, or between two calls, is layout and dropped; so is the closing tag, which may be
missing. Where a call turns out to be none, all that was read of it becomes content, with the white space before it,
and reading goes on at the character that didn't fit, so that a good call behind a bad one is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)
from coordinator.text.parsers.held_text import HeldTextParser
from coordinator.text.parsers.tags import END_TOOL_CALL, WHITESPACE, begins, skip_whitespace, unfinished


class Outcome(Enum):
    """How far a call has been read."""

    READING = auto()
    WHOLE = auto()
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class Step:
    """What a reader made of some text.

    read: how many of its characters were read. arguments: the piece of the arguments that they gave.
    """

    outcome: Outcome
    read: int
    arguments: str = ""


class CallReader(Protocol):
    """Reads one call from behind the tag that opened it."""

    @property
    def name(self) -> str | None:
        """The function's name, once it is known to be one of the tools; None before."""

    def read(self, text: str) -> Step:
        """Read as far as the text can be understood; the rest is passed again with more text behind it.

        The result must depend on the text alone, not on how it was cut.
        """


class _Part(Enum):
    TEXT = auto()
    CALL = auto()
    CLOSING = auto()  # a call is whole, its closing tag may follow
    LAYOUT = auto()  # the white space behind it


class TaggedCallParser(HeldTextParser):
    """Finds calls in text.

    openings: the tags that begin a call, each with a function that makes its reader. closing: what may stand behind a
    call.
    """

    def __init__(self, openings: dict[str, Callable[[], CallReader]], closing: str = END_TOOL_CALL) -> None:
        super().__init__()
        self._openings, self._closing = openings, closing
        self._part = _Part.TEXT
        self._index = 0
        self._reader: CallReader | None = None
        self._started = False
        self._call: list[str] = []  # all that was read of it, the white space in front included

    def finish(self, *, cut: bool = False) -> list[Event]:
        """See `ToolParser`."""
        if self._part is _Part.CALL:
            if not cut:
                self._call.append(self._held)
                self._give_up()
            elif self._started:
                self._events.append(ToolCallCut(self._index))
        elif self._part is _Part.TEXT:
            tag = unfinished(self._held, *self._openings) if cut else 0
            text = self._held[: len(self._held) - tag]
            # White space in front of a call is layout.
            self._add_content(text.rstrip(WHITESPACE) if tag else text)
        # What may be held otherwise is the beginning of a closing tag, which belongs to the call.
        self._held = ""
        return self._take_events()

    def _go_on(self) -> bool:
        match self._part:
            case _Part.TEXT:
                return self._find_call()
            case _Part.CALL:
                return self._read_call()
            case _Part.CLOSING:
                return self._find_closing()
        self._held = self._held.lstrip(WHITESPACE)
        self._part = _Part.TEXT if self._held else _Part.LAYOUT
        return bool(self._held)

    def _find_call(self) -> bool:
        openings = [(at, tag) for tag in self._openings if (at := self._held.find(tag)) >= 0]
        at, tag = min(openings, default=(len(self._held) - unfinished(self._held, *self._openings), ""))
        text = self._held[:at].rstrip(WHITESPACE)
        self._add_content(text)
        if not tag:
            self._held = self._held[len(text) :]
            return False
        self._begin(tag, len(text), at + len(tag))
        return True

    def _begin(self, tag: str, start: int, end: int) -> None:
        """Begin a call behind the tag, which ends at a place of the held text; `start`: with the white space before."""
        self._call = [self._held[start:end]]
        self._held = self._held[end:]
        self._reader, self._started, self._part = self._openings[tag](), False, _Part.CALL

    def _read_call(self) -> bool:
        assert self._reader is not None
        step = self._reader.read(self._held)
        self._call.append(self._held[: step.read])
        self._held = self._held[step.read :]
        if self._reader.name is not None and not self._started:
            self._started = True
            self._events.append(ToolCallStart(self._index, self._reader.name))
        if step.arguments:
            self._events.append(ToolCallArguments(self._index, step.arguments))
        if step.outcome is Outcome.WHOLE:
            self._events.append(ToolCallEnd(self._index))
            self._index += 1
            self._reader, self._part = None, _Part.CLOSING
        elif step.outcome is Outcome.BROKEN:
            self._give_up()
        return step.outcome is not Outcome.READING

    def _find_closing(self) -> bool:
        start = skip_whitespace(self._held, 0)
        is_closing = begins(self._held, start, self._closing)
        if is_closing is None:
            return False
        if is_closing:
            self._held = self._held[start + len(self._closing) :]
        self._part = _Part.LAYOUT if is_closing else _Part.TEXT
        return True

    def _give_up(self) -> None:
        self._add_content("".join(self._call))
        self._index += self._started
        self._reader, self._part = None, _Part.TEXT

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))
