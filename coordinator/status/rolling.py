"""Sums over the steps of the last minute, kept by the second so that old ones fall out.

Owns nothing but numbers; the clock is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.engine.step_times import StepTaken
from services.messages.steps import StepKind

KEPT_S = 60
"""How far back the sums reach."""


@dataclass(slots=True)
class Sums:
    """Of some steps. Times in nanoseconds, lists with one entry a stage; sent_bytes as in StepTaken.

    computed_ns: of all steps. The others are of decode steps only, as prefill chunks overlap: step_ns in all, of which
    forward_ns, wire_ns and draft_ns. produced: tokens; verify steps offered guesses and accepted some of them.
    """

    computed_ns: list[int]
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
        none = [0] * stages
        return cls(none.copy(), none.copy(), none.copy(), [0] * (stages + 1), kept=[0] * block_rows)

    def add(self, step: StepTaken) -> None:
        for index, stage in enumerate(step.stages):
            self.computed_ns[index] += stage.forward_ns
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
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            summed = [a + b for a, b in zip(mine, theirs, strict=True)] if isinstance(mine, list) else mine + theirs
            setattr(self, name, summed)


class Rolling:
    """Steps of a chain of so many stages. clock: seconds, as `time.monotonic`."""

    def __init__(self, stages: int, block_rows: int, clock: Callable[[], float]) -> None:
        self._shape, self._clock = (stages, block_rows), clock
        self._seconds: deque[tuple[int, Sums]] = deque(maxlen=KEPT_S + 1)
        self.total = Sums.zero(*self._shape)

    def add(self, step: StepTaken) -> None:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Sums.zero(*self._shape)))
        self._seconds[-1][1].add(step)
        self.total.add(step)

    def last(self, seconds: int) -> tuple[Sums, float]:
        """Sums over the running second and as many before it, and the time that they cover."""
        now, found = self._clock(), Sums.zero(*self._shape)
        for second, sums in self._seconds:
            if second >= int(now) - seconds:
                found.merge(sums)
        return found, seconds + now % 1
