"""Reads an answer's text as it comes, and holds back what only more text can decide; parsers of calls share this."""

from __future__ import annotations

from abc import ABC, abstractmethod

from coordinator.text.parsers.events import Event


class HeldTextParser(ABC):
    """Takes pieces of text. What it makes of the held text, a subclass says in `_go_on`, which adds to `_events`."""

    def __init__(self) -> None:
        self._held = ""
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain now, possibly none."""
        self._held += text
        while self._go_on():
            pass
        return self._take_events()

    @abstractmethod
    def _go_on(self) -> bool:
        """Do the next thing that the held text allows; return False when more text is needed."""

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
