"""Sums over the steps of the last minute, kept by the second so that old ones can be left out.

It owns nothing but numbers; the clock is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.engine.step_times import StepTaken
from services.messages.steps import StepKind

KEPT_S = 60
"""How many seconds back the sums reach."""


@dataclass(slots=True)
class Sums:
    """Sums over some steps. Times are in nanoseconds, lists have one entry a stage; sent_bytes is as in StepTaken.

    Times are those of decode steps only, because prefill chunks overlap: step_ns is all of it, of which forward_ns,
    wire_ns and draft_ns. prefilled: the rows of prefill steps.
    produced: the tokens of decode steps. verifies, offered, accepted: how many verify steps there were, and how many
    draft tokens they offered and accepted.
    """

    forward_ns: list[int]
    wire_ns: list[int]
    sent_bytes: list[int]
    step_ns: int = 0
    draft_ns: int = 0
    steps: int = 0
    prefilled: int = 0
    produced: int = 0
    verifies: int = 0
    offered: int = 0
    accepted: int = 0
    kept: list[int] = field(default_factory=list)
    """How often a verify kept so many rows, from one row on."""

    @classmethod
    def zero(cls, stages: int, block_rows: int) -> Sums:
        """Return the sums over no steps, for a chain of so many stages and blocks of so many rows."""
        zeros = [0] * stages
        return cls(zeros.copy(), zeros.copy(), [0] * (stages + 1), kept=[0] * block_rows)

    def add(self, step: StepTaken) -> None:
        """Add a step."""
        for index, size in enumerate(step.sent_bytes):
            self.sent_bytes[index] += size
        if step.kind is StepKind.PREFILL:
            self.prefilled += step.rows
            return
        for index, stage in enumerate(step.stages):
            self.forward_ns[index] += stage.forward_ns
            self.wire_ns[index] += stage.wire_ns
        self.steps += 1
        self.step_ns += step.elapsed_ns
        self.draft_ns += step.draft_ns
        self.produced += step.kept
        if step.kind is StepKind.VERIFY:
            self.verifies += 1
            self.offered += step.rows - 1
            self.accepted += step.kept - 1
            self.kept[step.kept - 1] += 1

    def merge(self, other: Sums) -> None:
        """Add the sums over other steps."""
        for name in self.__dataclass_fields__:
            left, right = getattr(self, name), getattr(other, name)
            total = [a + b for a, b in zip(left, right, strict=True)] if isinstance(left, list) else left + right
            setattr(self, name, total)


class Rolling:
    """Sums over the steps of a chain with so many stages: `total` over all of them, `last` over recent ones.

    clock: returns seconds, as `time.monotonic` does.
    """

    def __init__(self, stages: int, block_rows: int, clock: Callable[[], float]) -> None:
        self._shape, self._clock = (stages, block_rows), clock
        self._seconds: deque[tuple[int, Sums]] = deque(maxlen=KEPT_S + 1)
        self.total = Sums.zero(*self._shape)

    def add(self, step: StepTaken) -> None:
        """Add a step that was answered now."""
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Sums.zero(*self._shape)))
        self._seconds[-1][1].add(step)
        self.total.add(step)

    def last(self, seconds: int) -> tuple[Sums, float]:
        """Return sums over the running second and as many before it, and how many seconds that is."""
        now, recent = self._clock(), Sums.zero(*self._shape)
        for second, sums in self._seconds:
            if second >= int(now) - seconds:
                recent.merge(sums)
        return recent, seconds + now % 1
