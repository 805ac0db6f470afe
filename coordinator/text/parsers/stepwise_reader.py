"""Reads one call piece by piece; readers of calls whose arguments are not JSON share this."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.text.parsers.tagged_calls import Outcome, Step
from coordinator.text.parsers.tool_schema import OfferedTool


class StepwiseReader:
    """Reads one call. What comes next is read by a method, which reads on from a position and returns the position
    behind what it read, None to wait for more text."""

    def __init__(self, tools: Mapping[str, OfferedTool], first: Callable[[str, int], int | None]) -> None:
        """first: what reads the call's beginning."""
        self.name: str | None = None
        self._tools = tools
        self._outcome = Outcome.READING
        self._next = first
        self._arguments: list[str] = []  # what the text that is being read gives, as pieces of JSON
        self._seen: set[str] = set()  # names of arguments

    def read(self, text: str) -> Step:
        """See `CallReader`."""
        position = 0
        self._arguments = []
        while self._outcome is Outcome.READING and (end := self._next(text, position)) is not None:
            position = end
        return Step(self._outcome, position, "".join(self._arguments))

    def _begin_call(self, name: str) -> bool:
        """Begin a call, and return whether there is a tool of this name."""
        if name not in self._tools:
            return False
        self.name = name
        self._arguments.append("{")
        return True

    def _end_call(self) -> None:
        self._arguments.append("}")
        self._outcome = Outcome.WHOLE

    def _break(self, position: int) -> int:
        self._outcome = Outcome.BROKEN
        return position
