"""Which tokens a request forbids where: all but its allowed ones, its bad words' last tokens, and ends that come early.

What is forbidden at a row depends on the tokens before it alone, draft tokens included, so that a draft changes
nothing. It owns the last tokens of the output, as far back as a bad word reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set as AbstractSet

import torch

from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams

_FORBIDDEN = float("-inf")


class TokenMasks:
    """The forbidden tokens of one session."""

    def __init__(
        self,
        sampling: SamplingParams,
        stop_token_ids: AbstractSet[int],
        prompt_length: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """stop_token_ids: what must not come before `min_tokens`. vocab_size: columns of the logits, on `device`."""
        self._prompt_length, self._min_tokens = prompt_length, sampling.min_tokens or 0
        self._device, self._vocab_size = device, vocab_size
        self._stops = self._mask(sorted(stop_token_ids)) if self._min_tokens and stop_token_ids else None
        # Bool [vocab] of what is forbidden everywhere; None for nothing.
        self._always: torch.Tensor | None = None
        singles = [sequence[0] for sequence in sampling.bad_token_sequences if len(sequence) == 1]
        if sampling.allowed_token_ids:
            self._always = ~self._mask(sampling.allowed_token_ids)
        if singles:
            self._always = self._mask(singles) if self._always is None else self._always | self._mask(singles)
        # By the number of tokens in front of a bad word's last one: these tokens, and the last ones that they forbid.
        self._endings: defaultdict[int, defaultdict[tuple[int, ...], list[int]]]
        self._endings = defaultdict(lambda: defaultdict(list))
        for *before, last in sampling.bad_token_sequences:
            if before:
                self._endings[len(before)][tuple(before)].append(last)
        self._outputs = 0  # how many were observed
        self._recent: list[int] = []

    @property
    def active(self) -> bool:
        """Whether a token may be forbidden behind what was observed."""
        early = self._stops is not None and self._outputs < self._min_tokens
        return early or self._always is not None or bool(self._endings)

    def observe(self, token_ids: Sequence[int], first_position: int) -> None:
        """Count committed tokens, the first of which stands at `first_position`; the prompt's are passed over."""
        outputs = token_ids[max(0, self._prompt_length - first_position) :]
        self._outputs += len(outputs)
        if self._endings and outputs:
            self._recent = [*self._recent, *outputs][-max(self._endings) :]

    def apply(self, logits: torch.Tensor, token_ids: Sequence[int], first_position: int, rows: int) -> torch.Tensor:
        """Return the logits with the forbidden tokens at minus infinity, up to the first row that has no other token.

        logits: [n, vocab], the first n of the step's last `rows` rows. token_ids: all tokens of the step, not yet
        observed, from `first_position` on. Where nothing but the end is left, as behind a complete grammar, it may come
        early. Raises InvalidArgument where the first row has no token left.
        """
        if self._always is not None:
            logits = logits.masked_fill(self._always, _FORBIDDEN)
        if self._endings:
            logits = logits.masked_fill(self._bad_endings(token_ids, first_position, rows)[: len(logits)], _FORBIDDEN)
        first_drawn = first_position + len(token_ids) - rows + 1
        early = min(len(logits), self._min_tokens - (first_drawn - self._prompt_length))
        if self._stops is not None and early > 0:
            without_end = logits[:early].masked_fill(self._stops, _FORBIDDEN)
            only_end = (without_end == _FORBIDDEN).all(-1, keepdim=True)
            logits = torch.cat([torch.where(only_end, logits[:early], without_end), logits[early:]])
        impossible = (logits == _FORBIDDEN).all(-1).nonzero()
        if not len(impossible):
            return logits
        possible = int(impossible[0])
        if not possible:
            raise InvalidArgument(
                "no token may follow: allowed_token_ids, bad_words and the grammar leave none",
                field="allowed_token_ids" if self._always is not None else "bad_words",
            )
        return logits[:possible]

    def _bad_endings(self, token_ids: Sequence[int], first_position: int, rows: int) -> torch.Tensor:
        """Return which tokens would complete a bad word at each of the last `rows` rows: bool [rows, vocab]."""
        outputs = [*self._recent, *token_ids[max(0, self._prompt_length - first_position) :]]
        bad = torch.zeros(rows, self._vocab_size, dtype=torch.bool)
        for row in range(rows):
            behind = len(outputs) - (rows - 1 - row)
            for length, endings in self._endings.items():
                if length <= behind and (last := endings.get(tuple(outputs[behind - length : behind]))):
                    bad[row, last] = True
        return bad.to(self._device)

    def _mask(self, token_ids: Sequence[int]) -> torch.Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(token_ids)] = True
        return mask.to(self._device)
