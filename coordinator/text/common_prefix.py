"""How far two sequences of token ids agree from their beginning."""

from __future__ import annotations


def common_prefix_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return how many tokens two sequences have in common from their beginning, before they first differ."""
    known, limit = 0, min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    # Slices compare far faster than a loop over tokens does; halving looks at each token about twice.
    while limit - known > 1:
        middle = (known + limit) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            limit = middle
    return known
