"""Which draft tokens are accepted; why this keeps the sampling distribution stands in `sampling.sampler`."""

from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet


def accept(draft_tokens: Sequence[int], chosen: Sequence[int], stop_tokens: AbstractSet[int]) -> list[int]:
    """Return the tokens that a step produces: the longest run of draft tokens that the target chose too, and the
    target's own token after it, but nothing after a stop token.

    draft_tokens: the inputs of rows 1, 2, …. chosen: the target's token after each row, one more than draft tokens, or
    fewer where the later rows cannot count. As many rows of the step count as tokens are returned, at least one.
    """
    produced: list[int] = []
    for row, token in enumerate(chosen):
        produced.append(token)
        if token in stop_tokens or row == len(draft_tokens) or draft_tokens[row] != token:
            break
    return produced
