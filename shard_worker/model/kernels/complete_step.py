"""Completes a step's parameters on the device where it is launched before the host knows what the step before came to:
where each session's rows begin, its known token, and the draft tokens behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.accept import ASKED, STOPS
from shard_worker.model.kernels.step_parameters import BASE, BEHIND, ENDED, FIRST_ROW, ROWS, StepParameters


@triton.jit(do_not_specialize=["line", "block_line"])
def _complete_step(
    lines, line, tokens, blocks, block_line, asked, known_tokens, draft_tokens,
    SESSION_ROWS: tl.constexpr, STOPS: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    lines += tl.program_id(0).to(tl.int64) * line
    before = tl.load(lines + BEHIND) - 1
    if (before < 0) | (tl.load(lines + ROWS) == 0):
        return
    blocks += before * block_line
    tl.store(lines + BASE, tl.load(blocks + BASE))
    known = tl.load(known_tokens + before)
    ended = known < 0
    for stop in tl.static_range(STOPS):
        ended = ended | (known == tl.load(asked + before * ASKED + 1 + stop))
    tl.store(lines + ENDED, ended.to(tl.int64))
    first, rows = tl.load(lines + FIRST_ROW), tl.load(lines + ROWS)
    tl.store(tokens + first, known)
    ms = 1 + tl.arange(0, SESSION_ROWS)
    drafted = tl.load(draft_tokens + tl.load(blocks + FIRST_ROW) + ms, mask=ms < rows, other=0)
    tl.store(tokens + first + ms, drafted, mask=ms < rows)


def complete_step(
    step: StepParameters,
    blocks: StepParameters,
    asked: torch.Tensor,
    known_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    session_rows: int,
) -> None:
    """Put the outcome of the step before into the parameters of the next one, which were sent already.

    step: the next step's parameters, with `BEHIND` of each session that it has. blocks: those of the draft's blocks
    behind the step before. asked, known_tokens: as `accept` had and left them for that step. draft_tokens: int64 [n],
    of all rows of the blocks. session_rows: a power of two, at least the rows of any session of the next step. A
    session that ended with the step before, by a stop token, gets `ENDED`: nothing of its rows counts.
    """
    sessions = step.lines.shape[1]
    _complete_step[(sessions,)](
        step.lines, step.lines.stride(1), step.tokens, blocks.lines, blocks.lines.stride(1), asked, known_tokens,
        draft_tokens, SESSION_ROWS=session_rows, STOPS=STOPS, ASKED=ASKED, num_warps=1,
    )  # fmt: skip
