"""Times of batches that were measured, and what is predicted of others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from coordinator.engine.fitted_times import FittedTimes


@dataclass(frozen=True)
class Batch:
    """Batches of one size, as they were measured."""

    sessions: float
    draft_tokens: float
    proposing: float
    seconds: float
    steps: int = 100


def law(sessions: float, draft_tokens: float, proposing: float) -> float:
    """Seconds of each kind of part that a batch may have."""
    each = 4.0 + 0.02 * sessions + 0.01 * draft_tokens + 0.05 * proposing
    return each + 0.9 * (proposing > 0) + 0.3 * (draft_tokens > 0)


def measured(seconds: Callable[[float, float, float], float], count: int = 40) -> list[Batch]:
    draw, batches = random.Random(1), []
    for _ in range(count):
        sessions = draw.randint(1, 32)
        proposing = draw.randint(0, sessions)
        tokens = draw.choice((0, 1, 3, 7)) * sessions
        batches.append(Batch(sessions, tokens, proposing, seconds(sessions, tokens, proposing)))
    return batches


@pytest.mark.parametrize("batch", [(1, 0, 0), (1, 15, 1), (16, 0, 0), (16, 48, 0), (16, 112, 16), (32, 0, 8)])
def test_a_law_of_the_same_parts_is_found(batch: tuple[int, int, int]) -> None:
    assert FittedTimes(measured(law)).predicted(*batch) == pytest.approx(law(*batch), rel=1e-6)


def test_no_part_saves_time() -> None:
    """Where batches with draft tokens were measured at better times, a token still costs nothing less than nothing."""
    times = FittedTimes(measured(lambda sessions, draft_tokens, _: 5.0 + 0.1 * sessions - 0.004 * draft_tokens))
    none, *some = [times.predicted(8, tokens, 8 if tokens else 0) for tokens in (0, 8, 24, 56)]
    assert min(some) >= none


def test_what_lies_near_counts_for_more() -> None:
    """Of two kinds of batches that no common law explains, each one's neighbours are predicted by it."""
    times = FittedTimes([Batch(2, 0, 0, 1.0), Batch(64, 0, 0, 3.0), Batch(4, 0, 0, 2.0)])
    assert 1.0 <= times.predicted(2, 0, 0) < 1.6
    assert times.predicted(64, 0, 0) == pytest.approx(3.0, rel=0.1)


def test_one_size_tells_only_itself() -> None:
    assert FittedTimes([Batch(4, 0, 0, 2.5)]).predicted(16, 0, 0) == pytest.approx(2.5)
