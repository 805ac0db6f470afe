"""Which of the combinations of parameters run by default: so few that each pair of values still meets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def covering(cases: Iterable[tuple[Any, ...]], together: int = 2) -> list[Any]:
    """All cases, as `pytest.mark.parametrize` takes them, most of them marked `slow`.

    Those that are not have every `together` values that stand in a case together: pairs of values by default, and every
    value by itself with 1. A case that brings the most of what is missing is taken first, of equal ones the first.
    """
    rows = list(cases)
    brings = [set(combinations(enumerate(map(repr, row)), min(together, len(row)))) for row in rows]
    missing, taken = set[Any]().union(*brings), set[int]()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(brings[number] & missing))
        taken.add(best)
        missing -= brings[best]
    return [pytest.param(*row, marks=() if number in taken else pytest.mark.slow) for number, row in enumerate(rows)]


def others_slow(cases: Iterable[tuple[Any, ...]], by_default: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All cases, of which those that are not among some named ones are marked `slow`."""
    rows, named = list(cases), list(by_default)
    assert all(one in rows for one in named), "a case that is to run by default is none of all"
    return [pytest.param(*row, marks=() if row in named else pytest.mark.slow) for row in rows]
