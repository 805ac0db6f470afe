"""Sums whose order no compiler chooses: pairs of neighbours, then pairs of pairs.

A reduction over many numbers is spread over a program's threads as its tile's shape has it, so that tiles of different
shapes would round differently. Of two numbers there is but one sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each row of x [ROWS, COLUMNS], [ROWS]. COLUMNS: a power of two, up to 1024."""
    for level in tl.static_range(10):
        if COLUMNS >> level > 1:
            x = tl.sum(tl.reshape(x, (ROWS, COLUMNS >> (level + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def whole_sum(x, COUNT: tl.constexpr):
    """Return the sum of all numbers of x, which are COUNT: a power of two, up to 1024 * 1024."""
    part: tl.constexpr = 1024 if COUNT > 1024 else COUNT
    parts = row_sums(tl.reshape(x, (COUNT // part, part)), COUNT // part, part)
    return tl.sum(row_sums(tl.reshape(parts, (1, COUNT // part)), 1, COUNT // part), 0)
