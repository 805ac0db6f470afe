"""How likely each draft token of a block is accepted behind those before it, as one request has shown it so far."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

FORGETTING = 0.9
"""By how much what was seen before counts less with each block that tells of a place: texts become easier and harder.
Seven blocks then weigh as much as all before them."""

FIRST_SHARE = 0.4
"""How often draft tokens are taken to be accepted before any was verified, in this answer or in others."""


class Acceptance:
    """Discounted counts by place, each place's prior being the share of the place before it.

    A place that was hardly ever reached is so taken to be as good as the one before it, and not as the best there could
    be. share_k = (prior_k * share_(k-1) + accepted_k) / (prior_k + reached_k), where the prior weighs `blocks` at
    first, and all three shrink by FORGETTING with each block that reaches the place (discounted averages as of Garivier
    and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems", 2011).

    Where the priors come from other answers, a text that is harder at the places that were reached is taken to be
    harder behind them as well: the odds of all priors are multiplied by one factor. Its logarithm is the maximum a
    posteriori estimate of the ease in Rasch's model ("Probabilistic Models for Some Intelligence and Attainment Tests",
    1960) with a normal prior of variance `ease_variance`, approximated by one Newton step from 0.
    """

    def __init__(
        self,
        places: int,
        first: Sequence[float] = (),
        blocks: float = 1.0,
        ease_variance: float = 0.0,
        lasting: float = 0.0,
    ) -> None:
        """places: draft tokens of the longest block. first: what is known of places before any block was verified, from
        the first one on. blocks: as how many blocks that counts. ease_variance: how much texts differ in how easy they
        are: the variance of the logarithm of the odds that a draft token is accepted, between answers. lasting: as how
        many blocks what was known before counts at least, however many come."""
        self._first = [*first[:places], *[None] * (places - len(first))]
        self._accepted = [0.0] * places
        self._reached = [0.0] * places
        self._prior_weight = [blocks] * places
        self._lasting = lasting
        self._ease_variance = ease_variance
        self.surplus = self.information = 0.0
        """How many more draft tokens were accepted than the answers of others had it, and the variance of that if no
        text were easier than another."""
        self._surplus = self._information = 0.0
        """The same, of which older blocks count less."""
        self._shares: list[float] | None = None
        """As of the last block; None where they are to be computed anew."""

    def copied(self) -> Acceptance:
        """Return the same measurements, to which other blocks can be added."""
        other = copy.copy(self)
        other._first, other._prior_weight = [*self._first], [*self._prior_weight]
        other._accepted, other._reached = [*self._accepted], [*self._reached]
        return other

    def go_on(self, first: Sequence[float], weight: float) -> None:
        """Take what others' blocks of the next number were like for what is known of its places, as much as of the
        first one's before it. weight: of what was seen before, at another place of the text."""
        self._shares = None
        self._first[: len(first)] = first[: len(self._first)]
        for counts in (self._accepted, self._reached):
            counts[:] = [weight * count for count in counts]
        self._prior_weight = [max(1.0, self._lasting, one) for one in self._prior_weight]

    def observe(self, draft_tokens: int, accepted: int, *, begins: bool = False) -> None:
        """Add a block of so many draft tokens, the first `accepted` of which were accepted. begins: it is one of the
        answer's first ones, of which `first` tells."""
        self._shares = None
        self._surplus *= FORGETTING
        self._information *= FORGETTING
        for place in range(min(draft_tokens, accepted + 1)):
            if (first := self._first[place]) is not None:
                surplus, information = (place < accepted) - first, first * (1 - first)
                if begins:
                    self.surplus += surplus
                    self.information += information
                self._surplus += surplus
                self._information += information
            self._accepted[place] = FORGETTING * self._accepted[place] + (place < accepted)
            self._reached[place] = FORGETTING * self._reached[place] + 1
            self._prior_weight[place] = max(self._lasting, FORGETTING * self._prior_weight[place])

    @property
    def shares(self) -> Sequence[float]:
        """Of the blocks that reach each place, those whose draft token there is accepted, in all likelihood."""
        if self._shares is None:
            self._shares = self._likely_shares()
        return self._shares

    def _likely_shares(self) -> list[float]:
        shares, before = [], FIRST_SHARE
        ease = math.exp(self._ease_variance * self._surplus / (1 + self._ease_variance * self._information))
        counts = zip(self._first, self._prior_weight, self._accepted, self._reached, strict=True)
        for first, weight, accepted, reached in counts:
            if first is not None:
                before = ease * first / (1 - first + ease * first)
            before = (weight * before + accepted) / (weight + reached)
            shares.append(before)
        return shares
