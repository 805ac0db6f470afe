"""No tool calls: all text is content. For models whose template teaches none, and requests without tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.text.parsers.events import ContentDelta, Event
from coordinator.text.parsers.tool_schema import Tool, ToolSchema
from services.errors import InvalidArgument


class Parser:
    """Passes everything through."""

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        pass

    def push(self, text: str) -> list[Event]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def is_taught_by(template: str) -> bool:
    """Never: it is what remains."""
    return False


def call_grammar(tool: Tool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Raises InvalidArgument."""
    raise InvalidArgument("the model's chat template teaches no tool calls, so none can be forced", field="tool_choice")
