"""The whole way from a model's text to events: its reasoning is split off first, then calls are found in the rest."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.text.parsers.events import ContentDelta, Event
from coordinator.text.parsers.reasoning import ReasoningParser
from coordinator.text.parsers.tools import ToolParser


class OutputParser:
    """Reads one answer. What looks like a call inside the reasoning is not taken for one."""

    def __init__(self, reasoning: ReasoningParser, tools: ToolParser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain now, possibly none."""
        return self._pass(self._reasoning.push(text))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events of the text that was held back, now that no more can come.

        cut: whether the answer's length ended the text, and not the model. What may have become a tag is dropped then,
        and a call whose function is known stays one.
        """
        return self._pass(self._reasoning.finish(cut=cut)) + self._tools.finish(cut=cut)

    def _pass(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            passed += self._tools.push(event.text) if isinstance(event, ContentDelta) else [event]
        return passed
