"""How long a step of several answers takes, fitted to the times of those that were measured.

It owns nothing that changes: it is made of measurements, for the questions that are asked of them at one time. It must
not know which answers there are, nor what draft tokens are worth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Protocol

FAR = 4.0
"""How much less a measurement weighs with twice or half as many sessions, or twice or half as many rows of each."""

SURE_STEPS = 4
"""With so many steps a measurement weighs half as much as one that is sure."""

_PARTS = 6
_CHOSEN = [(0, *parts) for count in range(_PARTS - 1, -1, -1) for parts in itertools.combinations(range(1, 6), count)]
"""Which of a batch's parts its seconds are fitted to: as many as what was measured tells apart, the first ones
first."""


class Measured(Protocol):
    """Batches of about one size: how many sessions one has, how many draft tokens these verify, how many of them ask
    the draft model for blocks, the seconds that it takes, and how many steps told of it."""

    @property
    def sessions(self) -> float: ...

    @property
    def draft_tokens(self) -> float: ...

    @property
    def proposing(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    @property
    def steps(self) -> int: ...


class FittedTimes:
    """Predicts the seconds of a batch: a constant, something for each draft token, for each session that asks the draft
    model for a block, for any that does, for each session and for any draft token.

    These are fitted to what was measured by least squares, which counts the more the nearer it is. None of them is
    negative; where too little was measured to tell them apart some are left out.
    """

    def __init__(self, measured: Iterable[Measured]) -> None:
        known, parts = [], []
        self._seconds: list[float] = []
        for one in measured:
            # By what share of it a time is missed counts, not by how much; and one step alone is easily missed.
            weight = one.steps / (one.steps + SURE_STEPS) / one.seconds**2
            known.append((weight, math.log2(one.sessions), math.log2(one.draft_tokens / one.sessions + 1)))
            parts.append(_parts(one.sessions, one.draft_tokens, one.proposing))
            self._seconds.append(one.seconds)
        self._known = known
        columns = [*zip(*parts, strict=True), tuple(self._seconds)]
        # What is summed for a prediction, but for the weights: of each two parts, and of each with the seconds.
        self._products = [[[*map(mul, columns[i], columns[j])] for j in range(i, _PARTS + 1)] for i in range(_PARTS)]

    def predicted(self, sessions: float, draft_tokens: float, proposing: float) -> float:
        """Return the seconds of such a batch."""
        size, rows = math.log2(sessions), math.log2(draft_tokens / sessions + 1)
        weights = [
            weight / (1 + FAR * (abs(own_size - size) + abs(own_rows - rows)) ** 2)
            for weight, own_size, own_rows in self._known
        ]
        # Of all parts once: which of them are chosen only leaves out some of these sums.
        sums = [[0.0] * (_PARTS + 1) for _ in range(_PARTS)]
        for i, products in enumerate(self._products):
            for j, product in enumerate(products, i):
                sums[i][j] = sum(map(mul, weights, product))
                if j < _PARTS:
                    sums[j][i] = sums[i][j]
        at = _parts(sessions, draft_tokens, proposing)
        for chosen in _CHOSEN:
            fitted = _fitted(sums, chosen)
            if fitted is not None:
                return sum(share * at[part] for share, part in zip(fitted, chosen, strict=True))
        return min(self._seconds)


def _parts(sessions: float, draft_tokens: float, proposing: float) -> tuple[float, ...]:
    # Fewer than one session is one in some of the batches.
    return 1.0, draft_tokens, proposing, min(1.0, proposing), sessions, float(draft_tokens > 0)


def _fitted(sums: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Return the factors with which the chosen parts of x come nearest to y by least squares, None where nothing tells
    them apart or one of them is negative.

    sums: over all measurements, of the product of each part with each one and with y at the end, times their weights.
    """
    size, at = len(chosen), (*chosen, _PARTS)
    rows = [[sums[i][j] for j in at] for i in chosen]
    for i, row in enumerate(rows):
        pivot = row[i]
        if pivot <= 1e-6 * sums[chosen[i]][chosen[i]]:
            return None
        for other in rows[i + 1 :]:
            factor = other[i] / pivot
            if factor:
                for j in range(i + 1, size + 1):
                    other[j] -= factor * row[j]
    found = [0.0] * size
    for i in reversed(range(size)):
        row, left = rows[i], rows[i][size]
        for j in range(i + 1, size):
            left -= row[j] * found[j]
        if left < 0:
            return None
        found[i] = left / row[i]
    return found
