"""How many rows and sessions the steps of the last seconds had, of each stage, out of what its worker has counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from coordinator.status.report import Batches
from services.messages.description import BatchCounts

RECENT_S = 5.0
"""Steps are told back to the last report that is at least so old."""


class RecentBatches:
    """Remembers what one stage has counted, from report to report; at first it tells of all steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: deque[tuple[float, BatchCounts]] = deque()

    def since_before(self, counts: BatchCounts) -> Batches | None:
        """Return the steps that came lately, None where there were none. counts: what the stage has counted by now."""
        now, reports = self._clock(), self._reports
        if reports and reports[-1][1].steps > counts.steps:
            # Another worker took its place.
            reports.clear()
        while len(reports) > 1 and reports[1][0] <= now - RECENT_S:
            reports.popleft()
        steps, rows, sessions = counts.steps, counts.rows, counts.sessions
        if reports:
            before = reports[0][1]
            steps, rows, sessions = steps - before.steps, rows - before.rows, sessions - before.sessions
        reports.append((now, counts))
        return Batches(steps=steps, rows=round(rows / steps, 2), sessions=round(sessions / steps, 2)) if steps else None
