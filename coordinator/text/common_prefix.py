"""How far two sequences of token ids agree from their beginning."""

from __future__ import annotations


def common_prefix_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return how many tokens two sequences have in common from their beginning, before they first differ."""
    agreed, limit = 0, min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    # Slices compare far faster than a loop over tokens does; halving looks at each token about twice.
    while limit - agreed > 1:
        middle = (agreed + limit) // 2
        if a[agreed:middle] == b[agreed:middle]:
            agreed = middle
        else:
            limit = middle
    return agreed
