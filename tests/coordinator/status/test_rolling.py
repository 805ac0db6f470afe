"""Sums over recent steps: what falls out, what is counted where."""

from __future__ import annotations

import pytest

from coordinator.engine.step_times import StageShare, StepTaken, StepTimes, sent_bytes, split_time
from coordinator.status.board import shares_of
from coordinator.status.rolling import KEPT_S, Rolling
from services.messages.steps import Commit, StageTiming, StepKind


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step(kind: StepKind = StepKind.VERIFY, rows: int = 16, kept: int = 12, draft_ns: int = 20) -> StepTaken:
    """100 ns in all: 30 and 25 computed, 5 and 20 on the wire, 20 drafted."""
    return StepTaken("r", kind, rows, kept, 100, draft_ns, (StageShare(30, 5), StageShare(25, 20)), (64, 1000, 0))


def test_a_steps_time_is_split_over_computing_and_wire() -> None:
    """The first stage waited for the second from 70 to 40; what is between its own time and that is the wire."""
    commit = Commit(0, 5, (1,), (StageTiming(30, 90, 1000), StageTiming(40, 45, 7)))

    stages = split_time(commit, 100)
    times = StepTimes()
    times.add(stages)
    times.add(stages)

    assert stages == (StageShare(30, 10), StageShare(40, 15))
    assert (times.forward_ns, times.wire_ns) == ([60, 80], [20, 30])
    assert sent_bytes(commit, 16) == (64, 1000, 7)
    # Where layers were split anew, what other stages took says nothing about those that there are.
    times.add(stages[:1])
    assert (times.forward_ns, times.wire_ns) == ([30], [10])


def test_kinds_of_steps_are_told_apart() -> None:
    """Prefill counts with its rows only, a plain step as one row, a verify by what it kept."""
    rolling = Rolling(2, 16, Clock())
    for taken in (step(StepKind.PREFILL, 512, 512, 0), step(StepKind.DECODE, 1, 1), step(), step(kept=16)):
        rolling.add(taken)

    total = rolling.total
    assert (total.prefilled, total.steps, total.produced) == (512, 3, 29)
    assert (total.verifies, total.offered, total.accepted) == (2, 30, 26)
    assert [index + 1 for index, count in enumerate(total.kept) if count] == [12, 16]
    assert (total.forward_ns, total.wire_ns) == ([90, 75], [15, 60])
    assert (total.step_ns, total.draft_ns, total.sent_bytes) == (300, 60, [256, 4000, 0])


def test_old_steps_fall_out() -> None:
    """Sums over recent seconds leave out older steps, while the total keeps them all."""
    clock = Clock()
    rolling = Rolling(2, 16, clock)
    rolling.add(step())
    clock.now += 4.5
    rolling.add(step())

    sums, seconds = rolling.last(5)
    assert (sums.verifies, seconds) == (2, 5.5)
    clock.now += 3
    assert rolling.last(5)[0].verifies == 1
    assert rolling.last(KEPT_S)[0].verifies == 2
    for _ in range(3 * KEPT_S):
        clock.now += 1
        rolling.add(step())
    assert rolling.last(KEPT_S)[0].verifies == KEPT_S + 1
    assert rolling.total.verifies == 3 * KEPT_S + 2


@pytest.mark.parametrize(
    ("stage", "draft", "expected"),
    [
        (0, False, (0.3, 0.0, 0.05, 0.65)),
        (1, True, (0.45, 0.2, 0.2, 0.35)),
        (None, True, (0.2, 0.2, 0.0, 0.8)),
    ],
)
def test_shares_of_a_steps_time(stage: int | None, draft: bool, expected: tuple[float, ...]) -> None:
    """As stages, a stage with the draft beside it and a draft alone see it; without steps there are none."""
    rolling = Rolling(2, 16, Clock())
    assert shares_of(rolling.total, stage, draft=draft) is None
    rolling.add(step())

    shares = shares_of(rolling.total, stage, draft=draft)
    assert shares is not None
    assert (shares.busy, shares.drafting, shares.wire, shares.wait) == pytest.approx(expected)
    assert shares_of(rolling.total, None, draft=False) is None
