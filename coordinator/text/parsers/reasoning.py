"""Splits a model's thinking from its answer's text.

There is at most one block of thinking, at the beginning: from a `<think>` with nothing but white space before it, or
from the first character where the chat template has opened `<think>` itself, up to the first `</think>` or else to the
end. All other tags are ordinary text. The newlines that templates write on the inner side of both tags and behind the
second belong to neither text. Some models have other tags than these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.text.parsers.events import ContentDelta, Event, ReasoningDelta
from coordinator.text.parsers.lark import literal
from coordinator.text.parsers.tags import (
    END_GEMMA_CHANNEL,
    END_THINK,
    GEMMA_CHANNEL,
    THINK,
    WHITESPACE,
    begins,
    skip_whitespace,
    unfinished,
)


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """What a model's thinking stands between.

    opened_by: the parts of what opens it, of which one may be a token. closing: what ends it. behind: what templates
    write behind that. turns: where the last turn of a prompt begins; a tag in front of it belongs to the history.
    """

    opened_by: tuple[str, ...]
    closing: str
    behind: str
    turns: tuple[str, ...]

    @property
    def opening(self) -> str:
        """What opens it."""
        return "".join(self.opened_by)

    def opening_term(self, tag: Callable[[str], str]) -> str:
        """Return the grammar's term for what opens it. tag: turns a tag into a term."""
        return " ".join(tag(part) for part in self.opened_by)

    @property
    def behind_term(self) -> str:
        """The grammar's term for what templates write behind it, with a space in front; none where that is nothing."""
        return f" {literal(self.behind)}" if self.behind else ""


TAGGED = ThinkingTags((THINK,), END_THINK, "\n\n", ("<|im_start|>", "<|im_end|>"))
OF_GEMMA = ThinkingTags((GEMMA_CHANNEL, "thought"), END_GEMMA_CHANNEL, "", ("<|turn>", "<turn|>"))


def tags_in(template: str) -> ThinkingTags | None:
    """Return what reasoning stands between in a chat template, as source text; None where it has none."""
    return next((tags for tags in (TAGGED, OF_GEMMA) if tags.opening in template), None)


class Opening(Enum):
    """How the prompt leaves the model's thinking."""

    UNDECIDED = auto()  # the model may begin to think or not
    INSIDE = auto()  # the prompt ends inside an open `<think>`
    CLOSED = auto()  # the prompt has a closed block already, so that the model doesn't think


def opening_of(prompt: str, tags: ThinkingTags = TAGGED, turn_tokens: Sequence[str] | None = None) -> Opening:
    """Return how a rendered prompt, or a tail of it that holds the last turn, leaves the model's thinking.

    turn_tokens: what the family's templates put in front of or behind a turn, None for what the tags say.
    """
    last_turn = max(prompt.rfind(token) for token in turn_tokens or tags.turns) + 1
    opened, closed = prompt.rfind(tags.opening, last_turn), prompt.rfind(tags.closing, last_turn)
    if opened == closed:
        return Opening.UNDECIDED
    return Opening.INSIDE if opened > closed else Opening.CLOSED


class _Part(Enum):
    BEGINNING = auto()
    REASONING = auto()
    BEHIND = auto()  # the newlines after the closing tag
    CONTENT = auto()


class ReasoningParser:
    """Splits one answer.

    inside: whether the prompt has opened the thinking. enabled: whether the model thinks at all. tags: around it.
    """

    def __init__(self, *, inside: bool = False, enabled: bool = True, tags: ThinkingTags = TAGGED) -> None:
        self._opening, self._closing = tags.opening, tags.closing
        self._part = _Part.CONTENT if not enabled else _Part.REASONING if inside else _Part.BEGINNING
        self._held = ""
        self._begun = False  # whether any reasoning was given out

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain now, possibly none."""
        self._held += text
        events: list[Event] = []
        if self._part is _Part.BEGINNING:
            self._begin()
        if self._part is _Part.REASONING:
            events += self._reason()
        if self._part is _Part.BEHIND:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._part = _Part.CONTENT
        if self._part is _Part.CONTENT:
            events += self._content()
        return events

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events of the text that was held back, now that no more can come.

        cut: whether the answer's length ended the text. What may have become a tag is dropped then.
        """
        if cut and self._part in (_Part.BEGINNING, _Part.REASONING):
            self._held = self._held[: len(self._held) - unfinished(self._held, self._opening, self._closing)].rstrip(
                WHITESPACE
            )
        if self._part is not _Part.REASONING:
            return self._content()
        rest, self._held = self._held, ""
        return [ReasoningDelta(rest)] if rest else []

    def _begin(self) -> None:
        start = skip_whitespace(self._held, 0)
        opened = begins(self._held, start, self._opening)
        if opened:
            self._held = self._held[start + len(self._opening) :]
            self._part = _Part.REASONING
        elif opened is False:
            self._part = _Part.CONTENT

    def _reason(self) -> list[Event]:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        end = self._held.find(self._closing)
        tag = end if end >= 0 else len(self._held) - unfinished(self._held, self._closing)
        text = self._held[:tag].rstrip("\n")
        if end >= 0:
            self._held = self._held[end + len(self._closing) :]
            self._part = _Part.BEHIND
        else:
            self._held = self._held[len(text) :]
        self._begun = self._begun or bool(text)
        return [ReasoningDelta(text)] if text else []

    def _content(self) -> list[Event]:
        text, self._held = self._held, ""
        return [ContentDelta(text)] if text else []
