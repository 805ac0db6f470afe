"""What comes on two ways is told in the order of the steps, nothing of it twice or never, and as soon as it can be."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from services.errors import FailedPrecondition
from services.messages.batch_frames import BatchAnswer
from services.messages.steps import Commit, Event, Proposal, SnapshotRestored, StageTiming
from services.streams.step_order import MOST_EARLY, StepOrder

RESTORED = SnapshotRestored("1" * 32, 5, ())


def commit(step: int, *, asks: bool) -> Commit:
    return Commit(step, step + 1, (7,), (StageTiming(0, 0),), propose_tokens=2 if asks else 0)


def proposal(step: int) -> Proposal:
    return Proposal(step, (8, 9), 0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_any_two_ways(steps: list[tuple[bool, bool]], draw: object) -> None:
    """steps: of each, whether draft tokens come behind it, and whether it is answered with those of other sessions."""
    stream: list[Event | BatchAnswer] = [RESTORED]
    beside: list[Event | BatchAnswer] = []
    expected: list[Event] = [RESTORED]
    for number, (asks, together) in enumerate(steps):
        events = [commit(number, asks=asks), *([proposal(number)] if asks else [])]
        expected += events
        if together:
            beside.append(BatchAnswer(0, *events))
        else:
            stream += events
    order, told, came = StepOrder(), [], set[int]()
    while stream or beside:
        way = draw.choice([one for one in (stream, beside) if one])
        event = way.pop(0)
        told += order.add(event)
        came |= {id(one) for one in ([event.commit, event.proposal] if isinstance(event, BatchAnswer) else [event])}
        answers = [one for one in expected if one is not RESTORED]
        ready = next((count for count, one in enumerate(answers) if id(one) not in came), len(answers))
        assert [one for one in told if one is not RESTORED] == answers[:ready]
    assert sorted(map(id, told)) == sorted(map(id, expected))


def test_what_was_not_announced() -> None:
    """A proposal that its commit does not speak of is told at once, as workers before protocol 3.3 send it."""
    order = StepOrder()
    assert order.add(commit(0, asks=False)) == (commit(0, asks=False),)
    assert order.add(proposal(0)) == (proposal(0),)
    assert order.add(commit(1, asks=False)) == (commit(1, asks=False),)


@pytest.mark.parametrize("step", [0, 1, MOST_EARLY + 3])
def test_steps_that_cannot_be_answered_now(step: int) -> None:
    """An answer that comes twice, or to a step far ahead, is none to wait for."""
    order = StepOrder()
    for number in (0, 1):
        order.add(commit(number, asks=False))
    with pytest.raises(FailedPrecondition, match=f"step {step} is answered, and the next one to be answered is 2"):
        order.add(BatchAnswer(0, commit(step, asks=False)))
    assert order.add(commit(2, asks=False)) == (commit(2, asks=False),)
