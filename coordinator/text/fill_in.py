"""Prompts for the middle of a text, for models that were trained to fill it in."""

from __future__ import annotations

from coordinator.text.tokenizer import Tokenizer
from services.errors import InvalidArgument

# The tokens in front of the prefix, in front of the suffix and in front of the middle, by family.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, Seed
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)


def fill_in_ids(tokenizer: Tokenizer | None, prefix: str, suffix: str, most: int | None = None) -> tuple[int, ...]:
    """Return the prompt whose continuation is what belongs between two texts.

    most: how many tokens either may have. Raises InvalidArgument for a model whose tokenizer has no tokens for that,
    TextTooLong for more tokens.
    """
    for marks in _MARKS if tokenizer is not None else ():
        assert tokenizer is not None
        ids = [token for mark in marks if (token := tokenizer.token_id(mark)) is not None]
        if len(ids) == len(marks):
            before, behind = (tokenizer.encode(text, add_special_tokens=False, most=most) for text in (prefix, suffix))
            return (ids[0], *before, ids[1], *behind, ids[2])
    raise InvalidArgument(
        f"suffix is {suffix[:80]!r}, and this model was not made to fill in a middle: its tokenizer has no such tokens "
        f"as {_MARKS[0][0]}. Leave suffix out",
        field="suffix",
    )
