"""An answer as the output items of OpenAI's Responses API, and the events by which a stream shows them grow.

Whole and streamed replies are made by the same code, so they hold the same items.
"""

from __future__ import annotations

from typing import Any

from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallCut,
    ToolCallEnd,
    ToolCallStart,
)

StreamedEvent = tuple[str, dict[str, Any]]
"""A streamed event: its type, and its fields except `type` and `sequence_number`."""

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The output items of one answer. `done` are the complete ones, and the call in which the answer's length ended it.

    A call that was broken off is none of them. A stream has begun to show such a call before that was known. It is
    closed there as incomplete, and its text comes again in a message.
    """

    def __init__(self, unique_id: str) -> None:
        self.done: list[dict[str, Any]] = []
        self._unique_id = unique_id
        self._index = -1  # of the newest item, broken calls included
        self._kind = ""  # of the open item
        self._name = ""  # of the open call
        self._text: list[str] = []

    @property
    def reasoning(self) -> str:
        """The text of all reasoning items."""
        return "".join(item["content"][0]["text"] for item in self.done if item["type"] == "reasoning")

    def add(self, event: Event) -> list[StreamedEvent]:
        """Add one piece of the answer and return the events that show it."""
        match event:
            case ContentDelta(text):
                return [*self._opened("message"), self._more("response.output_text.delta", text, logprobs=[])]
            case ReasoningDelta(text):
                return [*self._opened("reasoning"), self._more("response.reasoning_text.delta", text)]
            case ToolCallStart(_, name):
                closed = self._close("incomplete" if self._kind == "function_call" else "completed")
                self._name = name
                return [*closed, *self._opened("function_call")]
            case ToolCallArguments(_, text):
                return [self._more("response.function_call_arguments.delta", text)]
            case ToolCallEnd():
                return self._close("completed")
            case ToolCallCut():
                return self._close("incomplete", stays=True)

    def finish(self, status: str) -> list[StreamedEvent]:
        """Close the last item with this status and return the events; an empty answer becomes an empty message."""
        opened = self._opened("message") if self._index < 0 else []
        return opened + self._close(status)

    def _opened(self, kind: str) -> list[StreamedEvent]:
        if self._kind == kind:
            return []
        closed = self._close("incomplete" if self._kind == "function_call" else "completed")
        self._kind, self._text = kind, []
        self._index += 1
        added = self._item("in_progress")
        if kind in _TEXTS:
            added["content"] = []
        events = [*closed, ("response.output_item.added", {"output_index": self._index, "item": added})]
        if kind in _TEXTS:
            events.append(("response.content_part.added", {**self._place(), "part": self._part()}))
        return events

    def _more(self, event: str, text: str, **fields: Any) -> StreamedEvent:
        self._text.append(text)
        return event, {**self._place(), "delta": text, **fields}

    def _close(self, status: str, *, stays: bool = False) -> list[StreamedEvent]:
        """Close the open item with this status. stays: whether a call is one of the answer's items all the same."""
        if not self._kind:
            return []
        item, text, events = self._item(status), "".join(self._text), list[StreamedEvent]()
        if self._kind == "message":
            events.append(("response.output_text.done", {**self._place(), "text": text, "logprobs": []}))
        elif self._kind == "reasoning":
            events.append(("response.reasoning_text.done", {**self._place(), "text": text}))
        elif status == "completed":
            done = {**self._place(), "name": self._name, "arguments": text}
            events.append(("response.function_call_arguments.done", done))
        if self._kind in _TEXTS:
            events.append(("response.content_part.done", {**self._place(), "part": self._part()}))
        events.append(("response.output_item.done", {"output_index": self._index, "item": item}))
        if self._kind in _TEXTS or status == "completed" or stays:
            self.done.append(item)
        self._kind = ""
        return events

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._id(), "output_index": self._index}
        return {**place, "content_index": 0} if self._kind in _TEXTS else place

    def _id(self) -> str:
        return f"{_PREFIXES[self._kind]}_{self._unique_id}{self._index:02d}"

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXTS[self._kind], "text": "".join(self._text)}
        return {**part, "annotations": [], "logprobs": []} if self._kind == "message" else part

    def _item(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(), "type": self._kind, "status": status}
        if self._kind == "message":
            return {**item, "role": "assistant", "content": [self._part()]}
        if self._kind == "reasoning":
            return {**item, "summary": [], "content": [self._part()]}
        call_id = f"call_{self._unique_id}{self._index:02d}"
        return {**item, "call_id": call_id, "name": self._name, "arguments": "".join(self._text)}
