"""A worker is its holder's while that listens, and for LEASE_S after that."""

from __future__ import annotations

import pytest

from services.errors import FailedPrecondition
from services.messages.holder import LEASE_S, WORKER_HELD, Holder
from shard_worker.lease import Lease

ONE, OTHER = Holder("1", "process 1 on alpha"), Holder("2", "process 2 on beta")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(clock)


def refused(lease: Lease, holder: Holder | None) -> bool:
    """Whether sessions of a process are refused, as its loads are then."""
    try:
        lease.check(None if holder is None else holder.holder_id)
    except FailedPrecondition:
        with pytest.raises(FailedPrecondition, match=f"held by {ONE.name} since") as raised:
            lease.take(holder)
        return raised.value.reason == WORKER_HELD
    return False


def test_before_anybody_holds_it_all_may_use_it(lease: Lease) -> None:
    """As a caller may that does not say who it is; what such a one has loaded is anybody's."""
    assert not refused(lease, OTHER)
    lease.take(None)
    assert not refused(lease, OTHER)
    assert not refused(lease, None)


def test_it_is_the_holders_while_that_listens(lease: Lease, clock: Clock) -> None:
    """However long, on however many connections, and for LEASE_S behind the last one."""
    lease.take(ONE)
    with lease.listening("1"):
        with lease.listening("1"):
            clock.now += 1000
        clock.now += 1000
        assert refused(lease, OTHER)
        assert refused(lease, None)
        assert not refused(lease, ONE)
    clock.now += LEASE_S - 0.1
    assert refused(lease, OTHER)
    clock.now += 0.2
    assert not refused(lease, OTHER)
    lease.take(OTHER)
    with pytest.raises(FailedPrecondition, match="held by process 2 on beta"):
        lease.check("1")


def test_a_holder_that_comes_back_keeps_it(lease: Lease, clock: Clock) -> None:
    """A connection that broke and is there again loses nothing."""
    lease.take(ONE)
    with lease.listening("1"):
        pass
    clock.now += LEASE_S - 0.1
    with lease.listening("1"), lease.listening("2"):
        clock.now += LEASE_S
        assert refused(lease, OTHER)


def test_who_never_listens_holds_it_for_a_while(lease: Lease, clock: Clock) -> None:
    """A release without heartbeats would keep it for ever otherwise."""
    lease.take(ONE)
    assert refused(lease, OTHER)
    clock.now += LEASE_S + 0.1
    assert not refused(lease, OTHER)


def test_how_long_nobody_has_cared_for_it(lease: Lease, clock: Clock) -> None:
    """From the moment on when its holder listens no more, until somebody else takes it; then anew."""
    clock.now += 1000
    assert lease.left_for_s == 0
    with lease.listening("1"):
        lease.take(ONE)
        clock.now += 1000
        assert lease.left_for_s == 0
    clock.now += LEASE_S + 1
    assert lease.left_for_s == LEASE_S + 1
    with lease.listening("2"):
        assert lease.left_for_s == LEASE_S + 1
        lease.take(OTHER)
        clock.now += 1000
        assert lease.left_for_s == 0
    clock.now += 5
    assert lease.left_for_s == 5
    with lease.listening("2"):
        assert lease.left_for_s == 0
    lease.end()
    assert lease.left_for_s == 0
    lease.take(ONE)


def test_who_never_listens_is_never_gone(lease: Lease, clock: Clock) -> None:
    """A release without heartbeats would lose what it uses otherwise."""
    with lease.listening("2"):
        lease.take(OTHER)
    clock.now += LEASE_S + 1
    lease.take(ONE)
    clock.now += 1000
    assert lease.left_for_s == 0
