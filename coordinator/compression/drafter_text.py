"""A text as the drafter reads it: its tokens, and which characters each of them stands for.

What is kept is cut out of the text itself, so two models with different vocabularies need not agree on anything but
characters, and none of those is ever split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.text.tokenizer import Tokenizer

LONGEST_QUESTION = 4000
"""How many characters a last paragraph may have to count as the question."""

QUESTION_TAIL = 1000
"""How many characters at the end of a longer paragraph count as the question."""

Span = tuple[int, int]
"""A half-open range of characters, or of tokens."""


@dataclass(frozen=True, slots=True)
class DrafterText:
    """A text as the drafter reads it. spans: the characters of each token."""

    text: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]

    def excerpt(self, token_ranges: Iterable[Span]) -> str:
        """Return the text of some ranges of tokens and the question, in order, nothing twice."""
        characters = [(self.spans[first][0], self.spans[last - 1][1]) for first, last in token_ranges]
        return "".join(self.text[first:last] for first, last in merge_spans([*characters, question_span(self.text)]))


def tokenize(tokenizer: Tokenizer, text: str) -> DrafterText:
    """Return a text as the drafter reads it. Raises TokenizerError for text that is no Unicode."""
    token_ids, spans = tokenizer.encode_spans(text)
    return DrafterText(text, tuple(token_ids), tuple(spans))


def question_span(text: str) -> Span:
    """Return the characters in which the user asks: the last paragraph, or the end of it where it is long."""
    end = len(text.rstrip())
    start = text.rfind("\n\n", 0, end) + 2 if "\n\n" in text[:end] else 0
    if end - start > LONGEST_QUESTION:
        space = text.find(" ", end - QUESTION_TAIL, end)
        start = space + 1 if space >= 0 else end - QUESTION_TAIL
    return start, len(text)


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in ascending order, those that touch each other joined, empty ones left out."""
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        elif first < last:
            merged.append((first, last))
    return merged
