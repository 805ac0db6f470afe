"""What is taken of places of a block that an answer has not reached, by others and by what it has shown so far."""

from __future__ import annotations

import pytest

from coordinator.engine.acceptance import FIRST_SHARE, Acceptance


def test_a_place_is_as_good_as_the_one_before_it_until_it_is_reached() -> None:
    """Without any other answer."""
    acceptance = Acceptance(3)
    assert acceptance.shares == [FIRST_SHARE] * 3
    acceptance.observe(3, 1)
    first, second, third = acceptance.shares
    assert first > FIRST_SHARE
    assert second == third < first


@pytest.mark.parametrize(("accepted", "harder"), [(0, True), (3, False)])
def test_what_is_hard_at_one_place_is_hard_behind_it(accepted: int, harder: bool) -> None:
    """Where texts differ, the odds of places that were never reached change with those of the ones that were; where
    they don't, what others have shown stays."""
    others = (0.8, 0.9, 0.95, 0.9)
    alike, differing = (Acceptance(4, others, ease_variance=variance) for variance in (0.0, 4.0))
    for acceptance in (alike, differing):
        for _ in range(3):
            acceptance.observe(3, accepted)
    assert alike.shares[3] == others[3]
    assert (differing.shares[3] < others[3]) is harder
    assert all((one < other) is harder for one, other in zip(differing.shares, others, strict=True))
