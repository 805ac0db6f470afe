"""Notices a device that hangs: work on it that does not end long after its time, as a kernel that never returns.

Work is counted in looks, one every LOOK_S, so that a time in which the whole process did not run counts once. It knows
nothing of what is computed but how many rows it has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

LOOK_S = 0.5
"""Between two looks at the work."""

FLOOR_S = 10.0
"""How long any work may take."""

FACTOR = 20
"""A step may take so many times what steps like it have taken."""

FIRST_S = 600.0
"""How long work may take whose like has not been measured: first steps, which may compile, and all that is no step."""

_COST_KEPT = 0.9
"""What counts of the highest cost after each step like it."""


class Work:
    """Something that a device does. allowed_s: how long it may take, None for as long as it likes."""

    def __init__(self, allowed_s: float | None = FIRST_S) -> None:
        self.allowed_s = allowed_s
        self.like: tuple[str, int] | None = None
        """What its cost is measured with: a kind of step and the magnitude of its rows; None where it is no step."""
        self.rows = 0
        self.given_up = False
        self.began = time.monotonic()


class StepCosts:
    """What steps have cost of late, by their kind and the magnitude of their rows."""

    def __init__(self) -> None:
        self._costs_s: dict[tuple[str, int], float] = {}
        self._row_s: dict[str, float] = {}

    def expect(self, work: Work, kind: str, rows: int) -> None:
        """Say that some work is a step of this kind and of so many rows, and how long it may take therefore."""
        work.like, work.rows = (kind, rows.bit_length()), rows
        cost_s = self._costs_s.get(work.like)
        if cost_s is not None:
            work.allowed_s = max(FLOOR_S, FACTOR * cost_s)
        else:
            # Computing rows together takes no longer than one by one.
            work.allowed_s = max(FIRST_S, FACTOR * rows * self._row_s.get(kind, 0.0))

    def ended(self, work: Work) -> None:
        """Take note of what a step has cost."""
        if work.like is None or work.given_up:
            return
        kind, seconds = work.like[0], time.monotonic() - work.began
        self._costs_s[work.like] = max(seconds, _COST_KEPT * self._costs_s.get(work.like, 0.0))
        self._row_s[kind] = max(seconds / max(work.rows, 1), _COST_KEPT * self._row_s.get(kind, 0.0))


class Watched(Protocol):
    """What the watchdog sees of the thread that owns a device."""

    @property
    def works(self) -> Sequence[Work]:
        """What runs now."""

    @property
    def unheeded(self) -> bool:
        """Whether jobs wait for the thread while it runs none."""

    @property
    def done_count(self) -> int:
        """How many jobs it has ever done."""

    def probe(self) -> None:
        """Have the thread do nothing, as a sign of life."""


class Watchdog:
    """Looks at the thread that owns a device. Call `look` every LOOK_S."""

    def __init__(self, thread: Watched) -> None:
        self._thread = thread
        self._looks: dict[Work, int] = {}
        self._unheeded_looks = self._done_count = 0

    def look(self) -> float | None:
        """Return for how many seconds the device has hung, None where it does not, as far as is known."""
        thread = self._thread
        self._looks = {work: self._looks.get(work, 0) + 1 for work in thread.works}
        idle = thread.unheeded and thread.done_count == self._done_count
        self._unheeded_looks = self._unheeded_looks + 1 if idle else 0
        self._done_count = thread.done_count
        if not self._looks and not thread.unheeded:
            thread.probe()
        late = [work for work in self._looks if work.allowed_s is not None and self._seconds(work) > work.allowed_s]
        for work in late:
            work.given_up = True
        unheeded_s = self._unheeded_looks * LOOK_S
        return max([*map(self._seconds, late), *([unheeded_s] if unheeded_s > FLOOR_S else [])], default=None)

    def _seconds(self, work: Work) -> float:
        return self._looks[work] * LOOK_S
