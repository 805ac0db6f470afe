"""Draft tokens that are taken by chance, so that a shape with random weights can be measured with its draft.

With random weights a draft's guesses are never right. A configuration that asks for random weights may say with what
chance the target chooses a draft token all the same; one with weights cannot. It must not know sessions or streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from services.errors import InvalidArgument
from services.model.random_weights import is_random

KEY = "synthetic_acceptance"
"""The key of config.json beside that of random weights: the chance with which a draft token is taken where all before
it are."""

DRAWS = 1 << 16
SPREAD = 40503
"""Which of the draws decides about a draft token: its position times SPREAD, plus its id, modulo DRAWS."""


class SyntheticAcceptance:
    """Replaces what the target chose: by the draft token that follows, or by another one where that is not taken.

    What is taken depends on the token and its position alone, so it is the same wherever and with whatever others a
    step is computed. refused: int64 [DRAWS] on the head's device, 1 for each draw by which a token is not taken.
    """

    def __init__(self, chance: float, vocab_size: int, device: torch.device) -> None:
        """chance: that a draft token is taken. vocab_size: the target's."""
        self.vocab_size = vocab_size
        drawn = torch.rand(DRAWS, generator=torch.Generator().manual_seed(1)) >= chance
        self.refused = drawn.long().to(device)
        self._refused_on_host: list[int] = drawn.long().tolist()

    def choose(self, token_ids: Sequence[int], base: int, chosen: Sequence[int]) -> list[int]:
        """Return what is chosen behind each row of a verify in place of `chosen`.

        token_ids: of the rows, the first of which stands at the position `base`; a draft token each but for the first.
        """
        found = []
        for position, draft_token in enumerate(token_ids[1:], base + 1):
            refused = self._refused_on_host[(position * SPREAD + draft_token) % DRAWS]
            found.append((draft_token + refused) % self.vocab_size)
        return [*found, *chosen[len(found) :]]


def read_synthetic_acceptance(
    config: Mapping[str, Any], vocab_size: int, device: torch.device
) -> SyntheticAcceptance | None:
    """Return what a target's config.json asks for, None for a target that chooses by itself.

    Raises InvalidArgument for a chance that is none, and for one beside weights, whose tokens mean something.
    """
    chance = config.get(KEY)
    if chance is None:
        return None
    if not is_random(config):
        raise InvalidArgument(
            f"config.json: {KEY} is for measuring with random weights, and this checkpoint has weights: leave it out",
            field=KEY,
        )
    if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
        raise InvalidArgument(f"config.json: {KEY} is {chance!r}; it must be a number from 0 to 1", field=KEY)
    return SyntheticAcceptance(float(chance), vocab_size, device)
