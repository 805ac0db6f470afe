"""Which tokens a request's grammar allows next, row by row of a step.

The matcher goes along the draft tokens as far as the grammar allows them, and is then rolled back: only what the
session commits counts. So the masks depend on the tokens before a row alone, and a draft token that breaks the grammar
is rejected like any other wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass

import torch
from llguidance import LLMatcher

from services.errors import InvalidArgument, ResourceExhausted


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """The token ids that have a meaning of their own for a grammar.

    vocab_size: columns of the logits. end: llguidance's own end-of-sequence id, which is none of the model's tokens.
    stops: the tokens that end the output. special_stops: those of them that are no text, which a grammar never matches
    by their text.
    """

    vocab_size: int
    end: int
    stops: AbstractSet[int]
    special_stops: AbstractSet[int]


class GrammarState:
    """A compiled grammar, and how far the committed output has come in it."""

    def __init__(self, matcher: LLMatcher, tokens: GrammarTokens, prompt_length: int, device: torch.device) -> None:
        """matcher: at the beginning of the grammar. prompt_length: tokens before the output. device: of the masks."""
        self._matcher, self._prompt_length, self._device = matcher, prompt_length, device
        self._vocab_size, self._end, self._stops = tokens.vocab_size, tokens.end, tokens.stops
        self._text_stops = tokens.stops - tokens.special_stops
        # A stop token came where the grammar was complete. The matcher never sees it.
        self._ended = False
        self._consumed = 0

    def observe(self, token_ids: Sequence[int], first_position: int) -> None:
        """Count committed tokens, the first of which stands at `first_position`; those of the prompt are passed over.

        Raises InvalidArgument for a token that the grammar does not allow where it stands.
        """
        for token in token_ids[max(0, self._prompt_length - first_position) :]:
            if not self._consume(token):
                raise InvalidArgument(
                    f"token {token} does not fit the grammar behind the {self._consumed} before it", field="token_ids"
                )

    def allowed(self, token_ids: Sequence[int], first_position: int, rows: int) -> torch.Tensor:
        """Return which tokens may follow each of the last `rows` of a step's tokens: bool [n, vocab].

        token_ids: all tokens of the step, not yet observed, from `first_position` on. n is less than `rows` where a
        draft token breaks the grammar or ends the output: the rows from there on cannot count. Raises InvalidArgument
        when no token may follow, ResourceExhausted when the grammar has become too complex.
        """
        consumed, ended = self._consumed, self._ended
        masks: list[bytearray] = []
        known = len(token_ids) - rows + 1
        try:
            self.observe(token_ids[:known], first_position)
            masks.append(self._mask())
            for position, draft_token in enumerate(token_ids[known:], first_position + known):
                if position >= self._prompt_length and (draft_token in self._stops or not self._consume(draft_token)):
                    break
                masks.append(self._mask())
        finally:
            if self._consumed > consumed:
                self._matcher.rollback(self._consumed - consumed)
            self._consumed, self._ended = consumed, ended
        packed = torch.stack([torch.frombuffer(mask, dtype=torch.uint8) for mask in masks]).to(self._device)
        bits = torch.arange(8, dtype=torch.uint8, device=self._device)
        return ((packed[:, :, None] >> bits) & 1).flatten(1)[:, : self._vocab_size].bool()

    def _consume(self, token: int) -> bool:
        """Go on by one token. Returns False, with nothing changed, where the token is not allowed."""
        if self._ended:
            return token in self._stops
        if token in self._stops and self._complete():
            self._ended = True
            return True
        if token == self._end or not self._matcher.try_consume_tokens([token]):
            return False
        self._consumed += 1
        return True

    def _complete(self) -> bool:
        return self._matcher.is_accepting() or self._matcher.is_stopped()

    def _mask(self) -> bytearray:
        """Return which tokens may come next: one bit a token, the lowest first, in ceil(vocab / 8) bytes."""
        size = (self._vocab_size + 7) // 8
        if self._ended:
            mask, complete = bytearray(size), True
        else:
            mask = bytearray(self._matcher.compute_bitmask())
            if self._matcher.is_error():
                raise ResourceExhausted(
                    f"the grammar has become too complex here: {self._matcher.get_error().splitlines()[0]}",
                    reason="GRAMMAR",
                    field="grammar",
                )
            complete = self._complete()
            _clear(mask, self._end)
            del mask[size:]
        if complete:
            for token in self._stops:
                mask[token >> 3] |= 1 << (token & 7)
        else:
            # A special token is here only where the grammar names it; one that is text would end half an output.
            for token in self._text_stops:
                _clear(mask, token)
        if self._vocab_size & 7:
            mask[-1] &= (1 << (self._vocab_size & 7)) - 1
        if mask.count(0) == len(mask):
            raise InvalidArgument(
                f"no token of the model may follow the first {self._consumed} under the grammar",
                reason="GRAMMAR",
                field="grammar",
            )
        return mask


def _clear(mask: bytearray, token: int) -> None:
    mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
