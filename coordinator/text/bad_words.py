"""The token sequences by which an answer could say a word that it must not."""

from __future__ import annotations

from functools import lru_cache

from coordinator.text.tokenizer import Tokenizer
from services.errors import InvalidArgument

MAX_BAD_WORDS = 256
"""Most bad words of one request."""

MAX_LENGTH = 1024
"""Most characters of one of them."""


@lru_cache(8)  # The prompts of one request have the same words.
def bad_token_sequences(tokenizer: Tokenizer | None, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at a text's beginning and, where that is another single piece, behind a space.

    Other ways to spell a word are not found, as in vLLM. Raises InvalidArgument for too many words, an empty and
    too long one, and where the model has no tokenizer.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidArgument("bad_words need a tokenizer and this checkpoint has none", field="bad_words")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument(
            f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are accepted", field="bad_words"
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if len(word) > MAX_LENGTH:
            raise InvalidArgument(
                f"bad_words has one of {len(word)} characters; at most {MAX_LENGTH} are accepted", field="bad_words"
            )
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not plain:
            raise InvalidArgument(f"bad_words has {word!r}; each must be a word", field="bad_words")
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        sequences[plain] = None
        # A space that is a token of its own leaves the word as it was.
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return tuple(sequences)
