"""From the target's text to the drafter's tokens and back: what is kept is cut out of the text itself.

So two models with different vocabularies need not agree on anything but characters, and none of those is ever split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.text.tokenizer import Tokenizer

LONGEST_QUESTION = 4000
"""Characters of a last paragraph that still counts as the question."""

QUESTION_TAIL = 1000
"""Characters kept of a longer one."""

Span = tuple[int, int]
"""Half-open range of characters, or of tokens."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as the drafter reads it. spans: the characters of each token."""

    text: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]

    def cut(self, kept: Iterable[Span]) -> str:
        """The text of the kept ranges of tokens and the question, in order, nothing twice."""
        characters = [(self.spans[first][0], self.spans[last - 1][1]) for first, last in kept]
        return "".join(self.text[first:last] for first, last in union([*characters, question_of(self.text)]))


def read(tokenizer: Tokenizer, text: str) -> Reading:
    """Raises TokenizerError for text that is no Unicode."""
    token_ids, spans = tokenizer.encode_spans(text)
    return Reading(text, tuple(token_ids), tuple(spans))


def question_of(text: str) -> Span:
    """Where the user asks: the last paragraph, or the end of it where it is long."""
    end = len(text.rstrip())
    start = text.rfind("\n\n", 0, end) + 2 if "\n\n" in text[:end] else 0
    if end - start > LONGEST_QUESTION:
        space = text.find(" ", end - QUESTION_TAIL, end)
        start = space + 1 if space >= 0 else end - QUESTION_TAIL
    return start, len(text)


def union(spans: Sequence[Span]) -> list[Span]:
    """Ascending and apart; empty spans are left out."""
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        elif first < last:
            found.append((first, last))
    return found
