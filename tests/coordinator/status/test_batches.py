"""The rows of a stage's steps of the last seconds, out of what it has counted since it began."""

from __future__ import annotations

from coordinator.status.batches import RecentBatches
from coordinator.status.report import Batches
from services.messages.description import BatchCounts


def test_steps_since_a_report_that_is_old_enough() -> None:
    """At first all of them; where nobody computed none, and where a new worker counts from 0 its own."""
    now = 0.0
    recent = RecentBatches(lambda: now)

    def report(at: float, steps: int, rows: int, sessions: int) -> Batches | None:
        nonlocal now
        now = at
        return recent.since_before(BatchCounts(steps, rows, sessions, ()))

    assert report(0, 4, 10, 6) == Batches(steps=4, rows=2.5, sessions=1.5)
    assert report(1, 6, 30, 16) == Batches(steps=2, rows=10, sessions=5)
    assert report(5.5, 7, 31, 17) == Batches(steps=3, rows=7, sessions=3.67)
    assert report(6.5, 7, 31, 17) == Batches(steps=1, rows=1, sessions=1)
    assert report(20, 7, 31, 17) is None
    assert report(21, 2, 8, 2) == Batches(steps=2, rows=4, sessions=1)
