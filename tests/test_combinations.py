"""What is left in the default run of combinations still has all that it must have."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.combinations import covering, others_slow


@pytest.mark.parametrize("together", [1, 2])
def test_every_pair_of_values_meets_by_default(together: int) -> None:
    """And no case is lost, and far from all are taken."""
    cases = list(product("abc", (1, 2, 3), (True, False), ("x",)))
    found = covering(cases, together)
    assert [case.values for case in found] == cases
    taken = [case.values for case in found if not case.marks]
    for places in combinations(range(4), together):
        assert {tuple(case[place] for place in places) for case in taken} == {
            tuple(case[place] for place in places) for case in cases
        }
    assert len(taken) <= (3 if together == 1 else 10)
    assert {mark.name for case in found for mark in case.marks} == {"slow"}


def test_those_that_are_named_run_by_default() -> None:
    """One that is named must be there."""
    found = others_slow([(1, "a"), (2, "b"), (3, "c")], [(2, "b")])
    assert [(case.values, bool(case.marks)) for case in found] == [
        ((1, "a"), True),
        ((2, "b"), False),
        ((3, "c"), True),
    ]
    with pytest.raises(AssertionError, match="none of all"):
        others_slow([(1, "a")], [(1, "b")])
