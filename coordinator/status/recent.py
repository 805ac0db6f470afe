"""What a worker did in the last seconds, out of what it has counted: its load, and rows and sessions of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from coordinator.status.report import Batches
from services.messages.description import BatchCounts, WorkerDescription

RECENT_S = 5.0
"""Work is told back to the last description that is at least so old."""


class RecentWork:
    """Remembers what one worker has counted, from description to description; at first it tells of all its work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._described: deque[tuple[float, WorkerDescription]] = deque()

    def add(self, description: WorkerDescription) -> tuple[float, Batches | None]:
        """Return the share of the last seconds in which the worker's devices had work, and the steps of a stage that
        came in them, None where there were none. description: what the worker says now, or said last."""
        now, described = self._clock(), self._described
        if described and described[-1][1] is description:
            described.pop()
        if described and described[-1][1].process_id != description.process_id:
            # Another worker took its place.
            described.clear()
        while len(described) > 1 and described[1][0] <= now - RECENT_S:
            described.popleft()
        before = described[0][1] if described else None
        described.append((now, description))
        return busy_share(before, description), _steps(None if before is None else before.batches, description.batches)


def busy_share(before: WorkerDescription | None, after: WorkerDescription) -> float:
    """Return in which share of the time between two descriptions of one worker its devices had work; without the first,
    of the time since it began. 0 for a worker of a release that does not count it."""
    busy_ns, counted_ns = after.busy_ns, after.counted_ns
    if before is not None:
        busy_ns, counted_ns = busy_ns - before.busy_ns, counted_ns - before.counted_ns
    return min(1.0, busy_ns / counted_ns) if counted_ns > 0 else 0.0


def _steps(before: BatchCounts | None, after: BatchCounts | None) -> Batches | None:
    """Return the steps between two counts of one stage."""
    if after is None:
        return None
    steps, rows, sessions = after.steps, after.rows, after.sessions
    if before is not None:
        steps, rows, sessions = steps - before.steps, rows - before.rows, sessions - before.sessions
    return Batches(steps=steps, rows=round(rows / steps, 2), sessions=round(sessions / steps, 2)) if steps else None
