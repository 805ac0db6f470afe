"""Decides on the device which rows of a step count, session by session, and makes the draft's next step ready with it.

What `shard_worker.sampling.acceptance` does: the longest run of draft tokens that the target chose too, and its own
token after it, but nothing behind a stop token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import BASE, ENDED, FIRST_ROW, ROWS, StepParameters

STOPS = 8
"""The most stop tokens of a session that there is room for."""

ASKED = 1 + STOPS
"""Numbers of a session that say what is asked for: one of those below, and then its stop tokens, -1 where there is
none."""

UNDECIDED, ACCEPTED, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which of a session's rows count: it is not decided here; those of accepted draft tokens; all, as those of a prompt,
of which only the token behind the last one counts."""


@triton.jit(do_not_specialize=["step_line", "counts", "line", "stride", "hidden"])
def _accept(
    step, step_line, tokens, chosen, asked, outcome, counts, appending, appended, proposing, line, stride, embedding,
    known_rows, known_tokens, hidden,
    TOGETHER: tl.constexpr, SESSION_ROWS: tl.constexpr, COPIES: tl.constexpr, STOPS: tl.constexpr,
    ASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decide for one session. step_line, line: how far sessions' numbers are apart, of the step and of the draft.
    counts: how many counts come before the tokens of `outcome`. stride: how far copies are apart."""
    session = tl.program_id(0).to(tl.int64)
    step += session * step_line
    asked += session * ASKED
    ms = tl.arange(0, SESSION_ROWS)
    rows = tl.load(step + ROWS)
    whole = tl.load(asked) == WHOLE
    if TOGETHER:
        first = tl.load(step + FIRST_ROW)
        tokens += first
        chosen += first
        appended += first
        if (rows == 0) | (tl.load(asked) == UNDECIDED):
            tl.store(outcome + session, tl.zeros_like(rows))
            return
        base = tl.load(step + BASE)
        if tl.load(step + ENDED) != 0:
            # Its context stays as it is, and a block is nobody's.
            tl.store(outcome + session, tl.zeros_like(rows))
            tl.store(appended + ms, tl.full((SESSION_ROWS,), -1, tl.int64), mask=ms < rows)
            for copy in tl.static_range(COPIES):
                tl.store(appending + session * line + copy * stride + ROWS, tl.zeros_like(rows))
                tl.store(proposing + session * line + copy * stride + BASE, base)
            return
        for copy in tl.static_range(COPIES):
            # The host may not know it yet.
            tl.store(appending + session * line + copy * stride + BASE, base)
        outcome_at = outcome + counts + first
    else:
        outcome_at = outcome + counts
    found = tl.load(chosen + ms, mask=ms < rows, other=0)
    goes_on = ms + 1 < rows
    goes_on = goes_on & (found == tl.load(tokens + 1 + ms, mask=goes_on, other=-1))
    for stop in tl.static_range(STOPS):
        goes_on = goes_on & (found != tl.load(asked + 1 + stop))
    last = tl.where(whole, rows - 1, tl.min(tl.where(goes_on, SESSION_ROWS, ms), 0).to(tl.int64))
    count = last + 1
    tl.store(outcome + session, tl.where(whole, 1, count))
    tl.store(outcome_at + ms, found, mask=(ms < rows) & (whole == 0))
    tl.store(outcome_at, tl.load(chosen + last), mask=whole)
    after = tl.load(step + BASE) + count
    if TOGETHER:
        # Rows that do not count are nobody's.
        tl.store(appended + ms, tl.full((SESSION_ROWS,), -1, tl.int64), mask=(ms >= count) & (ms < rows))
    for copy in tl.static_range(COPIES):
        tl.store(appending + session * line + copy * stride + ROWS, count)
        tl.store(proposing + session * line + copy * stride + BASE, after)
    known = tl.load(chosen + last)
    tl.store(known_tokens + session, known)
    row = embedding + known * hidden
    known_row = known_rows + session * hidden
    for start in range(0, hidden, BLOCK):
        hs = start + tl.arange(0, BLOCK)
        tl.store(known_row + hs, tl.load(row + hs, mask=hs < hidden), mask=hs < hidden)


def accept(
    step: StepParameters,
    chosen: torch.Tensor,
    asked: torch.Tensor,
    outcome: torch.Tensor,
    appending: StepParameters,
    proposing: StepParameters,
    embedding: torch.Tensor,
    known_rows: torch.Tensor,
    known_tokens: torch.Tensor,
    session_rows: int,
) -> None:
    """Decide on the device which rows of a step count, and complete the parameters of the draft's next step.

    step: the step's own parameters, for as many sessions as the draft's are. chosen: int64, the target's token for each
    row of the step. asked: int64 [sessions, ASKED], of each session what `ASKED` says. outcome: int64 [sessions + rows
    of the step], gets how many tokens each session has produced, and behind that the tokens, where its rows stand among
    those of all. `appending` gets which rows the draft appends, `proposing` where each block begins, and known_rows
    [sessions, hidden] the embedding of the token that it follows, which known_tokens, int64 [sessions], gets itself.
    session_rows: a power of two, at least the rows of any session whose rows do not all count anyway.
    """
    sessions, lines, appended = len(known_rows), appending.lines, appending.places(1).sessions
    _accept[(sessions,)](
        step.lines, step.lines.stride(1), step.tokens, chosen, asked, outcome, sessions, lines,
        appended, proposing.lines, lines.stride(1), lines.stride(0), embedding, known_rows, known_tokens,
        embedding.shape[1], TOGETHER=appended is not None, SESSION_ROWS=session_rows, COPIES=len(lines), STOPS=STOPS,
        ASKED=ASKED, BLOCK=1024, num_warps=4,
    )  # fmt: skip
