"""The load and the steps of a worker in the last seconds, out of what it has counted since it began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.status.recent import RecentWork
from coordinator.status.report import Batches
from services.messages.description import BatchCounts, WorkerDescription
from tests.services.fakes import WORKER


class Reports:
    """What is told of descriptions that come at times of a clock that the test sets."""

    def __init__(self) -> None:
        self._now = 0.0
        self._recent = RecentWork(lambda: self._now)

    def __call__(self, at: float, description: WorkerDescription) -> tuple[float, Batches | None]:
        self._now = at
        return self._recent.add(description)


def test_steps_since_a_report_that_is_old_enough() -> None:
    """At first all of them; where nobody computed none, and where a new worker counts from 0 its own."""
    reports = Reports()

    def report(at: float, steps: int, rows: int, sessions: int, process_id: int = 7) -> Batches | None:
        counts = BatchCounts(steps, rows, sessions, ())
        return reports(at, replace(WORKER, process_id=process_id, batches=counts))[1]

    assert report(0, 4, 10, 6) == Batches(steps=4, rows=2.5, sessions=1.5)
    assert report(1, 6, 30, 16) == Batches(steps=2, rows=10, sessions=5)
    assert report(5.5, 7, 31, 17) == Batches(steps=3, rows=7, sessions=3.67)
    assert report(6.5, 7, 31, 17) == Batches(steps=1, rows=1, sessions=1)
    assert report(20, 7, 31, 17) is None
    assert report(21, 2, 8, 2, process_id=8) == Batches(steps=2, rows=4, sessions=1)
    assert reports(22, replace(WORKER, process_id=8, batches=None))[1] is None


def test_load_is_the_workers_own_share_of_time() -> None:
    """By the worker's clock, since a description that is old enough; one that is told again changes nothing."""
    reports = Reports()

    def described(busy_s: float, counted_s: float, process_id: int = 7) -> WorkerDescription:
        counted = {"busy_ns": int(busy_s * 1e9), "counted_ns": int(counted_s * 1e9)}
        return replace(WORKER, process_id=process_id, **counted)

    assert reports(0, described(1, 10))[0] == pytest.approx(0.1)
    assert reports(1, described(2, 11))[0] == pytest.approx(1.0)
    last = described(2, 16)
    assert reports(6, last)[0] == reports(6.1, last)[0] == pytest.approx(0.0)
    assert reports(12, described(5, 22))[0] == pytest.approx(0.5)
    assert reports(13, described(0.5, 1, process_id=8))[0] == pytest.approx(0.5)
    # Of a release that does not count.
    assert reports(14, described(0, 0, process_id=9))[0] == 0
