"""Decides on the device which rows of a verify count, and makes the draft's next step ready with it.

What `shard_worker.sampling.acceptance` does, for greedy sessions: the longest run of draft tokens that are the target's
own argmax too, and its own token after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import BASE, ROWS, StepParameters

STOPS = 8
"""The most stop tokens that there is room for."""


@triton.jit(do_not_specialize=["stride", "hidden"])
def _accept(
    line, tokens, argmax, stops, outcome, appending, proposing, stride, embedding, known_row, hidden,
    STEP_ROWS: tl.constexpr, COPIES: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ms = tl.arange(0, STEP_ROWS)
    rows = tl.load(line + ROWS)
    chosen = tl.load(argmax + ms, mask=ms < rows, other=0)
    goes_on = ms + 1 < rows
    goes_on = goes_on & (chosen == tl.load(tokens + 1 + ms, mask=goes_on, other=-1))
    for stop in tl.static_range(STOPS):
        goes_on = goes_on & (chosen != tl.load(stops + stop))
    last = tl.min(tl.where(goes_on, STEP_ROWS, ms), 0)
    count = (last + 1).to(tl.int64)
    tl.store(outcome, count)
    tl.store(outcome + 1 + ms, chosen)
    after = tl.load(line + BASE) + count
    for copy in tl.static_range(COPIES):
        tl.store(appending + copy * stride + ROWS, count)
        tl.store(proposing + copy * stride + BASE, after)
    row = embedding + tl.load(argmax + last) * hidden
    for first in range(0, hidden, BLOCK):
        hs = first + tl.arange(0, BLOCK)
        tl.store(known_row + hs, tl.load(row + hs, mask=hs < hidden), mask=hs < hidden)


def accept(
    verify: StepParameters,
    argmax: torch.Tensor,
    stops: torch.Tensor,
    outcome: torch.Tensor,
    appending: StepParameters,
    proposing: StepParameters,
    embedding: torch.Tensor,
    known_row: torch.Tensor,
) -> None:
    """Decide on the device which rows of a verify count, and complete the parameters of the draft's next step.

    verify: the parameters of the step, which is one session's. argmax: int64, at least one token for each row of the
    verify. stops: int64 [STOPS], -1 where there is none. outcome: int64 [1 + rows], gets how many rows count, and
    behind that the tokens. `appending` gets how many rows the draft appends, `proposing` where its block begins, and
    known_row [hidden] the embedding of the token that the block follows.
    """
    _accept[(1,)](
        verify.lines, verify.tokens, argmax, stops, outcome, appending.lines, proposing.lines,
        appending.lines.stride(0), embedding, known_row, embedding.shape[1], STEP_ROWS=len(outcome) - 1,
        COPIES=len(appending.lines),
        STOPS=STOPS, BLOCK=1024, num_warps=4,
    )  # fmt: skip
