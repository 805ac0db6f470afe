"""Where the time of a step went: what each stage computed, and what lay between it and the one above.

A step's answer carries how long each stage computed and how long it waited for the stages below; the rest is the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.messages.steps import TOKEN_BYTES, Commit, StepKind


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage's part of a step. wire_ns: between it and the one above, both ways."""

    forward_ns: int
    wire_ns: int


@dataclass(frozen=True, slots=True)
class StepTaken:
    """One step of a request, answered.

    kind: PREFILL for all that comes before the first token. rows: sent; kept: how many of them count. elapsed_ns: with
    the draft's next guesses, which took draft_ns. sent_bytes: down the chain, one for each edge from the coordinator's
    on; the last one leads to a draft with a worker of its own.
    """

    request_id: str
    kind: StepKind
    rows: int
    kept: int
    elapsed_ns: int
    draft_ns: int
    stages: tuple[StageTime, ...]
    sent_bytes: tuple[int, ...]


def split_time(commit: Commit, elapsed_ns: int) -> tuple[StageTime, ...]:
    """elapsed_ns: from sending the step to its answer."""
    stages = []
    for timing in commit.timings:
        stages.append(StageTime(timing.forward_ns, max(0, elapsed_ns - timing.elapsed_ns)))
        elapsed_ns = timing.elapsed_ns - timing.forward_ns
    return tuple(stages)


def sent_bytes(commit: Commit, rows: int) -> tuple[int, ...]:
    """Of a step of so many rows, as in StepTaken."""
    return TOKEN_BYTES * rows, *(timing.passed_bytes for timing in commit.timings)


@dataclass(slots=True)
class StepTimes:
    """Nanoseconds of decode steps, summed by stage."""

    forward_ns: list[int] = field(default_factory=list)
    wire_ns: list[int] = field(default_factory=list)
    draft_ns: int = 0

    def add(self, stages: tuple[StageTime, ...]) -> None:
        if not self.forward_ns:
            self.forward_ns = [0] * len(stages)
            self.wire_ns = [0] * len(stages)
        for index, stage in enumerate(stages):
            self.forward_ns[index] += stage.forward_ns
            self.wire_ns[index] += stage.wire_ns
