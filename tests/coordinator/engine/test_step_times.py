"""What a step's answer tells of the batch that it was computed in."""

from __future__ import annotations

import pytest

from coordinator.engine.batch_costs import BatchTaken
from coordinator.engine.step_times import batch_taken
from services.messages.steps import Commit, StageTiming

TIMINGS = (StageTiming(4_000_000, 30_000_000), StageTiming(5_000_000, 9_000_000))


@pytest.mark.parametrize(
    ("rows", "proposing", "own", "draft_ns", "taken"),
    [
        # The slowest stage of a plain batch decides.
        (8, 0, 0, 0, BatchTaken(8, 0, 0.005)),
        # Its own draft's call: it is the last stage's time, with the blocks of others.
        (23, 2, 15, 3_000_000, BatchTaken(8, 15, 0.005, 2, 0.003, 16)),
        # Blocks of others came behind it, of which it does not know how long they took.
        (23, 2, 0, 0, BatchTaken(8, 15, 0.005, 2, None, 1)),
        # It ended with the step, and did not wait for its block.
        (8, 1, 15, 0, BatchTaken(8, 0, 0.005, 1, None, 16)),
        # A worker before protocol 3.4 tells of no other.
        (8, 0, 15, 3_000_000, BatchTaken(8, 0, 0.005, 1, 0.003, 16)),
    ],
)
def test_who_asked_for_blocks_tells_how_long_a_batch_took(
    rows: int, proposing: int, own: int, draft_ns: int, taken: BatchTaken
) -> None:
    commit = Commit(
        3, 9, (1,), TIMINGS, batch_sessions=8, batch_rows=rows, propose_tokens=own, batch_proposing=proposing
    )
    assert batch_taken(commit, draft_ns) == taken


def test_a_worker_that_tells_nothing_of_batches() -> None:
    assert batch_taken(Commit(3, 9, (1,), TIMINGS), 0) is None
