"""Times of steps that were measured, and what is predicted of others."""

from __future__ import annotations

import random

import pytest

from coordinator.engine.row_times import RowTimes

COUNTS = (16, 64, 128, 256, 512)


def law(sessions: float, rows: float) -> float:
    """Seconds of a step on a CPU."""
    return 4.0 + 0.2 * sessions + 0.05 * (rows - sessions)


@pytest.mark.parametrize(("sessions", "rows"), [(2, 2), (1, 16), (16, 16), (16, 64), (32, 512)])
def test_a_law_of_the_same_parts_is_found(sessions: int, rows: int) -> None:
    times, draw = RowTimes(), random.Random(1)
    for _ in range(40):
        count = draw.randint(1, 32)
        own = count * draw.choice((1, 2, 4, 8))
        times.add(count, own, law(count, own))
    assert times.predicted(sessions, rows) == pytest.approx(law(sessions, rows), rel=0.02)


def test_no_part_saves_time() -> None:
    """Where steps of more rows were measured at better times, still more are not taken to be better yet."""
    times = RowTimes()
    for rows in (8, 16, 32, 64):
        for _ in range(100):
            times.add(8, rows, 5.0 - 0.004 * rows)
    assert times.predicted(8, 512) >= times.predicted(8, 64) * 0.99


def test_what_lies_near_counts_for_more() -> None:
    """Of two kinds of steps that no common law explains, each one's neighbours are predicted by it."""
    times = RowTimes()
    for sessions, seconds in ((2, 1.0), (64, 3.0), (4, 2.0)):
        for _ in range(100):
            times.add(sessions, sessions, seconds)
    assert times.predicted(2, 2) == pytest.approx(1.0, rel=0.05)
    assert times.predicted(64, 64) == pytest.approx(3.0, rel=0.05)


def test_steps_are_computed_with_some_numbers_of_rows() -> None:
    """129 rows take as long as 256, 128 do not; more than the most are several steps."""
    times = RowTimes()
    times.row_counts = COUNTS
    for rows, seconds in ((100, 7.0), (200, 10.0), (400, 16.0)):
        for _ in range(100):
            times.add(16, rows, seconds)
    predicted = [times.predicted(16, rows) for rows in (128, 129, 256, 257, 512, 768)]
    assert predicted == pytest.approx([7.0, 10.0, 10.0, 16.0, 16.0, 24.0], rel=0.01)


def test_hope_ends_where_it_was_measured() -> None:
    """A size that was not measured may take less than predicted, one that was takes what it took."""
    times = RowTimes()
    for _ in range(100):
        times.add(4, 4, 1.0)
    assert times.predicted(4, 4, hope=0.5) == pytest.approx(1.0, rel=0.01)
    assert times.predicted(64, 512, hope=0.5) == pytest.approx(0.5, rel=0.01)


def test_nothing_was_measured() -> None:
    assert RowTimes().predicted(16, 16) == 0.0
