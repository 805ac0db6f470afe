"""How long a step takes, by how many sessions and rows it has, measured and predicted for numbers not met yet.

It must not know what the rows are, nor what they are worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2
"""Weight of the newest step in the moving averages of times."""

NEAR = 0.25
"""A time weighs half as much where its numbers of sessions and of rows are so many powers of two away, one sixteenth at
twice that."""

FAR = 6.0
"""Beyond so many powers of two a time says nothing as long as others are nearer."""

LEAST_S = 1e-6
"""No step takes less: of times that are compared by their ratios none may be 0."""

SURE_STEPS = 4
"""With so many steps a time weighs half as much as one that is sure."""

_CHOSEN = ((0, 1, 2), (0, 1), (0, 2), (0,))
"""To which of these parts of a step times are fitted: to as many as what was measured tells apart."""


@dataclass(slots=True)
class _Measured:
    """The moving averages of steps of about one size. steps: how many told of it."""

    sessions: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, sessions: float, rows: float, seconds: float, told_by: float) -> None:
        self.steps += 1
        weight = max(SMOOTHING / told_by, 1 / self.steps)
        self.sessions += weight * (sessions - self.sessions)
        self.rows += weight * (rows - self.rows)
        self.seconds += weight * (seconds - self.seconds)


class RowTimes:
    """The measurements of one kind of steps."""

    def __init__(self) -> None:
        self.row_counts: Sequence[int] = ()
        """The numbers of rows with which steps of several sessions are computed, rising, where those of other numbers
        take as long as the next higher one, and more rows than the highest one several steps; empty where each number
        has its own time."""
        self._measured: dict[tuple[int, int], _Measured] = {}
        """By half powers of two of sessions, and by eighths of rows."""
        self._predictions: dict[tuple[float, float, float], float] = {}
        """Since the last measurement: the same ones are asked for again."""

    def add(self, sessions: float, rows: float, seconds: float, told_by: float = 1) -> bool:
        """Record a step. told_by: how many tell of the same one. Returns whether it is the first one of its size."""
        rows, seconds = self._computed(sessions, rows), max(seconds, LEAST_S)
        self._predictions.clear()
        place = round(2 * math.log2(sessions)), round(8 * math.log2(rows))
        is_first = place not in self._measured
        self._measured.setdefault(place, _Measured()).add(sessions, rows, seconds, told_by)
        return is_first

    def predicted(self, sessions: float, rows: float, *, hope: float = 0.0) -> float:
        """Return the seconds of such a step, 0 where none was measured.

        hope: which share of them it may take less where none of about this size was measured; the more were, the less
        that share is. Who looks for the best size tries by it what might be better, and then knows.

        A constant and something for each session and for each row beside its first one, none of them negative, are
        fitted by least squares, which count what was measured the more the nearer it is.
        """
        most = self.row_counts[-1] if self.row_counts else math.inf
        if sessions > 1 and rows > most:
            return rows / most * self.predicted(sessions * most / rows, most, hope=hope)
        size = sessions, self._computed(sessions, rows), hope
        if size not in self._predictions:
            self._predictions[size] = self._fitted(*size)
        return self._predictions[size]

    def _fitted(self, sessions: float, rows: float, hope: float) -> float:
        """Return the seconds of a step that is computed with so many rows, otherwise as `predicted`."""
        sums, known = [[0.0] * 4 for _ in range(3)], 0.0
        for distance, one in self._nearest(math.log2(sessions), math.log2(rows)):
            # By what share of it a time is missed counts, not by how much; and one step alone is easily missed.
            near = 1 / (1 + (distance / NEAR) ** 4)
            weight = near * one.steps / (one.steps + SURE_STEPS) / one.seconds**2
            known += near * one.steps
            parts = (1.0, one.rows - one.sessions, one.sessions, one.seconds)
            for i in range(3):
                factor, row = weight * parts[i], sums[i]
                for j in range(i, 4):
                    row[j] += factor * parts[j]
        for i in range(1, 3):
            for j in range(i):
                sums[i][j] = sums[j][i]
        at = (1.0, rows - sessions, sessions)
        for chosen in _CHOSEN:
            fitted = _least_squares(sums, chosen)
            if fitted is not None:
                seconds = sum(share * at[part] for share, part in zip(fitted, chosen, strict=True))
                return seconds * (1 - hope / (1 + known))
        return 0.0

    def _computed(self, sessions: float, rows: float) -> float:
        """Return with how many rows a step is computed that has so many; one of a lone session is another matter."""
        return next((count for count in self.row_counts if round(rows) <= count and sessions > 1), rows)

    def _nearest(self, sessions: float, rows: float) -> list[tuple[float, _Measured]]:
        """Return what was measured with how far it is from these powers of two, without what lies too far."""
        found = [
            (abs(math.log2(one.sessions) - sessions) + abs(math.log2(one.rows) - rows), one)
            for one in self._measured.values()
        ]
        near = [one for one in found if one[0] < FAR]
        return near or found


def _least_squares(sums: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Return the factors with which the chosen parts of x come nearest to y by least squares, None where nothing tells
    them apart or one of them is negative.

    sums: over all measurements, of the product of each part with each one and with y at the end, times their weights.
    """
    size, at = len(chosen), (*chosen, len(sums))
    rows = [[sums[i][j] for j in at] for i in chosen]
    for i, row in enumerate(rows):
        pivot = row[i]
        if pivot <= 1e-12 * sums[chosen[i]][chosen[i]]:
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
