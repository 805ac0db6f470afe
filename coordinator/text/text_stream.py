"""Turns the tokens of an answer into text as they come, and ends it at a stop string.

Tokens are taken one at a time, so that the end of an answer doesn't depend on how many tokens a step produced.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.text.stop_strings import StopStrings
from coordinator.text.tokenizer import IncrementalDecoder, Tokenizer


class TextStream:
    """The text of one answer; without a tokenizer there is none."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop_strings: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """min_tokens: in the text of so many tokens no stop string is looked for. include_stop: the text ends with the
        stop string that ended it, and not in front of it. skip_special_tokens: special tokens have no text."""
        self._min_tokens, self._include_stop, self._tokens = min_tokens, include_stop, 0
        self._decoder: IncrementalDecoder | None = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._parts: list[str] = []

    @property
    def text(self) -> str | None:
        """All text so far, None without a tokenizer."""
        return "".join(self._parts) if self._decoder is not None else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return None if self._stops is None else self._stops.met

    def push(self, token_id: int) -> tuple[str, bool]:
        """Take a token; return the text that may be shown now, and whether a stop string has ended the answer."""
        if self._decoder is None:
            return "", False
        self._tokens += 1
        return self._pass(self._decoder.push([token_id]))

    def finish(self) -> tuple[str, bool]:
        """Return the text that was held back, and whether a stop string turned out to end the answer."""
        if self._decoder is None:
            return "", False
        text, stopped = self._pass(self._decoder.finish())
        if self._stops is not None and not stopped:
            rest = self._with_stop(self._stops.finish())
            self._parts.append(rest)
            return text + rest, self._stops.stopped
        return text, stopped

    def _pass(self, text: str) -> tuple[str, bool]:
        stopped = False
        if self._stops is not None and self._tokens > self._min_tokens:
            was_stopped = self._stops.stopped
            text, stopped = self._stops.push(text)
            if not was_stopped:
                text = self._with_stop(text)
        self._parts.append(text)
        return text, stopped

    def _with_stop(self, text: str) -> str:
        assert self._stops is not None
        return text + (self._stops.met or "") if self._include_stop else text
