"""No tool calls: all text is content. For models whose template teaches none, and requests without tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.text.parsers.events import ContentDelta, Event
from coordinator.text.parsers.tool_schema import OfferedTool, ToolSchema
from services.errors import InvalidArgument


class Parser:
    """Passes all text on as content."""

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        pass

    def push(self, text: str) -> list[Event]:
        """See `ToolParser`."""
        return [ContentDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Event]:
        """See `ToolParser`."""
        return []


def is_taught_by(template: str) -> bool:
    """Return False: this format is what is left where no other one is taught."""
    return False


def call_grammar(tool: OfferedTool, rule: str, tag: Callable[[str], str]) -> list[str]:
    """Raises InvalidArgument, as there is no way to write a call."""
    raise InvalidArgument("the model's chat template teaches no tool calls, so none can be forced", field="tool_choice")
