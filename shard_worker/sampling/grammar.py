"""Which tokens a request's grammar allows next, row by row of a step.

Guesses are walked along as far as the grammar allows them and then taken back: only what the session commits counts.
So the masks depend on the tokens before a row alone, whatever was guessed, and a guess that breaks the grammar is
rejected like any other wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet

import torch
from llguidance import LLMatcher

from services.errors import InvalidArgument, ResourceExhausted


class GrammarState:
    """A compiled grammar and how far the committed output has come in it.

    end: llguidance's own end-of-sequence id, which is none of the model's tokens. special_stops: those of stop_tokens
    that are no text, so that they are in the grammar's way nowhere.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        end: int,
        stop_tokens: AbstractSet[int],
        special_stops: AbstractSet[int],
        prompt_length: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._matcher, self._end, self._stops = matcher, end, stop_tokens
        self._text_stops = stop_tokens - special_stops
        self._prompt_length, self._vocab_size, self._device = prompt_length, vocab_size, device
        # A stop token came where the grammar was complete. The matcher never sees it.
        self._ended = False
        self._taken = 0

    def observe(self, token_ids: Sequence[int], first_position: int) -> None:
        """Count committed tokens; those of the prompt are passed over. Raises InvalidArgument for one that the grammar
        doesn't allow where it stands."""
        for token in token_ids[max(0, self._prompt_length - first_position) :]:
            if not self._take(token):
                raise InvalidArgument(
                    f"token {token} does not fit the grammar behind the {self._taken} before it", field="token_ids"
                )

    def allowed(self, token_ids: Sequence[int], first_position: int, rows: int) -> torch.Tensor:
        """The tokens that may follow each of the last `rows` of a step's tokens: bool [n, vocab].

        token_ids: all tokens of the step, not yet observed, from `first_position` on. n is less than rows where a guess
        breaks the grammar or ends the output: the rows from there on cannot count. Raises InvalidArgument when no
        token may follow, ResourceExhausted when the grammar has become too complex.
        """
        taken, ended = self._taken, self._ended
        masks: list[bytearray] = []
        known = len(token_ids) - rows + 1
        try:
            self.observe(token_ids[:known], first_position)
            masks.append(self._mask())
            for position, draft_token in enumerate(token_ids[known:], first_position + known):
                if position >= self._prompt_length and (draft_token in self._stops or not self._take(draft_token)):
                    break
                masks.append(self._mask())
        finally:
            if self._taken > taken:
                self._matcher.rollback(self._taken - taken)
            self._taken, self._ended = taken, ended
        packed = torch.stack([torch.frombuffer(mask, dtype=torch.uint8) for mask in masks]).to(self._device)
        bits = torch.arange(8, dtype=torch.uint8, device=self._device)
        return ((packed[:, :, None] >> bits) & 1).flatten(1)[:, : self._vocab_size].bool()

    def _take(self, token: int) -> bool:
        """Go on by one token; False, and nothing changed, where it isn't allowed."""
        if self._ended:
            return token in self._stops
        if token in self._stops and self._complete():
            self._ended = True
            return True
        if token == self._end or not self._matcher.try_consume_tokens([token]):
            return False
        self._taken += 1
        return True

    def _complete(self) -> bool:
        return self._matcher.is_accepting() or self._matcher.is_stopped()

    def _mask(self) -> bytearray:
        """One bit a token, the lowest first, in ceil(vocab / 8) bytes."""
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
                f"no token of the model may follow the first {self._taken} under the grammar",
                reason="GRAMMAR",
                field="grammar",
            )
        return mask


def _clear(mask: bytearray, token: int) -> None:
    mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
