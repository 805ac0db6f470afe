"""What is kept is cut out of the text: in order, whole characters, with the question."""

from __future__ import annotations

import random

import pytest

from coordinator.compression.drafter_text import (
    LONGEST_QUESTION,
    QUESTION_TAIL,
    Span,
    merge_spans,
    question_span,
    tokenize,
)
from coordinator.text.tokenizer import Tokenizer
from tests.e2e.conftest import ROOT

WORDS = [
    "the ",
    "keeper ",
    "Überraschung ",
    "日本語の文章 ",
    "naïve\n",
    "👩‍👩‍👧‍👦 ",
    "𝔘𝔫𝔦 ",
    "e\u0301 ",
    "x=1;\n\n",
    "  ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_checkpoint(ROOT / "deploy" / "demo" / "target")
    assert tokenizer is not None
    return tokenizer


def in_order(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_is_whole_characters_in_order(seed: int, tokenizer: Tokenizer) -> None:
    """Random ranges of tokens, also in the middle of a character's bytes."""
    rng = random.Random(seed)
    text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 200))) + "\n\nWhat is it?"
    drafter_text = tokenize(tokenizer, text)
    edges = sorted(rng.sample(range(len(drafter_text.token_ids) + 1), min(6, len(drafter_text.token_ids)) // 2 * 2))
    kept = list(zip(edges[::2], edges[1::2], strict=True))

    cut = drafter_text.excerpt(kept)

    assert "\ufffd" not in cut
    assert in_order(cut, text)
    assert cut.endswith("What is it?")
    for first, last in kept:
        inside = tokenizer.decode(drafter_text.token_ids[first:last]).strip("\ufffd")
        assert inside in cut or inside in text[question_span(text)[0] :]
    assert drafter_text.excerpt([(0, len(drafter_text.token_ids))]) == text


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("", ""),
        ("Why?", "Why?"),
        ("A story.\n\nWhy?", "Why?"),
        ("A story.\n\nWhy?\nAnd how?\n\n\n", "Why?\nAnd how?\n\n\n"),
        ("A story.\n\n" + "word " * 1000, None),
        ("x" * 9000, "x" * QUESTION_TAIL),
    ],
)
def test_the_question(text: str, question: str | None) -> None:
    """The question is the last paragraph, or the end of a long one from a word's beginning on."""
    first, last = question_span(text)
    if question is None:
        assert last == len(text)
        assert 0 < last - first <= QUESTION_TAIL + 1 < LONGEST_QUESTION
        assert text[first - 1] == " "
    else:
        assert text[first:last] == question


def test_merge_spans() -> None:
    """Spans that touch or overlap become one, and empty ones go."""
    spans: list[Span] = [(5, 7), (0, 2), (6, 9), (2, 3), (20, 20), (12, 13)]
    assert merge_spans(spans) == [(0, 3), (5, 9), (12, 13)]
    assert merge_spans([]) == []
