"""Which tokens a step produces. Why this keeps the sampling distribution stands in `shard_worker.sampling.sampler`."""

from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet


def accept(draft_tokens: Sequence[int], chosen: Sequence[int], stop_tokens: AbstractSet[int]) -> list[int]:
    """The longest run of guesses that the target chose too, and the target's own token after it.

    guesses: the draft's tokens, the inputs of rows 1, 2, …; chosen: the target's token after each row, one more than
    guesses, or fewer where the later rows cannot count. Nothing follows a stop token. Always at least one token; so
    many rows of the step count.
    """
    produced: list[int] = []
    for row, token in enumerate(chosen):
        produced.append(token)
        if token in stop_tokens or row == len(draft_tokens) or draft_tokens[row] != token:
            break
    return produced
