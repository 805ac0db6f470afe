"""At which positions of a prompt or an answer the state is kept, and how prefill is cut up around them.

Positions depend on the prompt alone, never on what is kept already: from a save point on, a request computes the rest
in the same chunks whether it restored the state there or computed it, so it rounds alike. A hit between save points
(the end of another request, a trimmed state) begins in other chunks until the next one; only in bfloat16 can that show,
where near-ties flip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Which prefixes are worth keeping.

    min_tokens: shorter prefixes are computed faster than fetched. checkpoint_tokens: how many tokens lie between two
    checkpoints, at least 1.
    """

    min_tokens: int = 32
    checkpoint_tokens: int = 2048


def save_points(prompt_length: int, boundaries: Sequence[int], policy: KeepPolicy) -> tuple[int, ...]:
    """Return the positions where prefill of a prompt stops and the state is kept, in ascending order.

    These are the end of the system part (the first of the turn boundaries, which ascend), the last two boundaries, the
    prompt's end, and checkpoints so that neighbours are never further apart than checkpoint_tokens, give or take
    min_tokens on either side.
    """
    inside = [boundary for boundary in boundaries if boundary <= prompt_length]
    candidates = {*inside[:1], *inside[-2:], prompt_length}
    points: list[int] = []
    before = 0
    for point in sorted(point for point in candidates if point >= max(policy.min_tokens, 1)):
        if point - before > policy.checkpoint_tokens:
            points += _checkpoints(before, point, policy)
        points.append(point)
        before = point
    return tuple(points)


def chunks(prompt_length: int, points: Sequence[int], size: int, start: int = 0) -> list[tuple[int, int]]:
    """Return prefill's steps from `start` on: half-open ranges of at most `size` rows, begun anew at every save point.

    From a save point they are exactly the rest of what they are from 0.
    """
    edges = sorted({*(point for point in points if start < point < prompt_length), prompt_length})
    ranges: list[tuple[int, int]] = []
    begin = start
    for edge in edges:
        ranges += [(row, min(row + size, edge)) for row in range(begin, edge, size)]
        begin = edge
    return ranges


def generation_checkpoint_due(last_saved_length: int, length: int, policy: KeepPolicy) -> bool:
    """Tell whether the state of an answer that has grown to `length` tokens, prompt included, should be kept now."""
    return length >= policy.min_tokens and length - last_saved_length >= policy.checkpoint_tokens


def _checkpoints(before: int, point: int, policy: KeepPolicy) -> list[int]:
    # Absolute multiples, so that prompts which share a document share its checkpoints, whatever comes after it; but
    # none that is too near to its neighbour to be worth keeping.
    step = policy.checkpoint_tokens
    first = (before + policy.min_tokens + step - 1) // step * step
    return list(range(max(first, step), point - policy.min_tokens + 1, step))
