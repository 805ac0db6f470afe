"""Where the time of a step goes: what each stage computed, and what passed between it and the stage above.

A step's answer carries how long each stage computed and how long it waited for the stages below; the rest is the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.engine.batch_costs import BatchTaken
from services.messages.steps import TOKEN_BYTES, Commit, StepKind


@dataclass(frozen=True, slots=True)
class StageShare:
    """One stage's part of a step's time. wire_ns: on the way between it and the stage above, down and up together."""

    forward_ns: int
    wire_ns: int


@dataclass(frozen=True, slots=True)
class StepTaken:
    """One step of a request that has been answered.

    kind: PREFILL for every step up to the first token. rows: how many were sent. kept: how many of them count.
    elapsed_ns: the step's time with the draft's next proposal, which took draft_ns of it. sent_bytes: what went down
    the chain on each edge from the coordinator's on; the last edge leads to a draft with a worker of its own.
    looked_up: the draft tokens were looked up in the text, and are not a draft model's.
    """

    request_id: str
    kind: StepKind
    rows: int
    kept: int
    elapsed_ns: int
    draft_ns: int
    stages: tuple[StageShare, ...]
    sent_bytes: tuple[int, ...]
    looked_up: bool = False


def split_time(commit: Commit, elapsed_ns: int) -> tuple[StageShare, ...]:
    """Return each stage's part of a step. elapsed_ns: from sending the step to its answer."""
    stages = []
    for timing in commit.timings:
        stages.append(StageShare(timing.forward_ns, max(0, elapsed_ns - timing.elapsed_ns)))
        elapsed_ns = timing.elapsed_ns - timing.forward_ns
    return tuple(stages)


def sent_bytes(commit: Commit, rows: int) -> tuple[int, ...]:
    """Return `StepTaken.sent_bytes` of a step of so many rows."""
    return TOKEN_BYTES * rows, *(timing.passed_bytes for timing in commit.timings)


def block_share(commit: Commit, draft_ns: int) -> float:
    """Return which share of a step's time on the workers the draft model took for its next block."""
    return draft_ns / max(1, draft_ns + sum(timing.forward_ns for timing in commit.timings))


def batch_taken(commit: Commit, draft_ns: int) -> BatchTaken | None:
    """Return what a step was computed in, None where the last stage does not tell it.

    draft_ns: what the draft took for the next blocks, 0 where the answer waited for none. Stages work on different
    batches at once, so that the slowest one decides, and the last one is not done before its draft is: of a batch some
    of whose sessions asked for blocks only these can tell how much longer that took.
    """
    if not commit.batch_sessions:
        return None
    *others, last = (timing.forward_ns for timing in commit.timings)
    slowest_ns = max([*others, last])
    # Workers before protocol 3.4 do not tell of the others.
    proposing = max(commit.batch_proposing, int(commit.propose_tokens > 0))
    block_s = max(0, last + draft_ns - slowest_ns) / 1e9 if draft_ns or not proposing else None
    return BatchTaken(
        commit.batch_sessions,
        max(0, commit.batch_rows - commit.batch_sessions),
        slowest_ns / 1e9,
        proposing,
        block_s,
        1 + commit.propose_tokens if proposing else 0,
    )


@dataclass(slots=True)
class StepTimes:
    """The nanoseconds of an answer's decode steps, summed for each stage.

    Where layers were split anew on the way, those of the stages that there are now.
    """

    forward_ns: list[int] = field(default_factory=list)
    wire_ns: list[int] = field(default_factory=list)
    draft_ns: int = 0

    def add(self, stages: tuple[StageShare, ...]) -> None:
        """Add one step's times."""
        if len(self.forward_ns) != len(stages):
            self.forward_ns = [0] * len(stages)
            self.wire_ns = [0] * len(stages)
        for index, stage in enumerate(stages):
            self.forward_ns[index] += stage.forward_ns
            self.wire_ns[index] += stage.wire_ns
