"""The walk of DFlash2's selector through the blocks of all sessions, from each one's known token on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import FIRST_ROW, ROWS, Places
from shard_worker.model.kernels.sums import row_sums


@triton.jit
def _select(
    logits, tokens, weighing, predecessors, successors, known, lines, chosen, line, rank,
    FIRST: tl.constexpr, TOGETHER: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Walk through one session's block. FIRST: the row that chooses its first token. BLOCK, RANK: powers of two,
    CANDIDATES or more and `rank` or more."""
    session = tl.program_id(0).to(tl.int64)
    lines += session * line
    first = tl.load(lines + FIRST_ROW) if TOGETHER else tl.load(lines + ROWS) * 0
    token = tl.load(known + session)
    ks, rs = tl.arange(0, BLOCK), tl.arange(0, RANK)
    for row in range(first + FIRST, first + tl.load(lines + ROWS)):
        candidates = tl.load(tokens + row * CANDIDATES + ks, mask=ks < CANDIDATES, other=0)
        before = tl.load(predecessors + token * rank + rs, mask=rs < rank, other=0.0).to(tl.float32)
        before *= tl.load(weighing + row * rank + rs, mask=rs < rank, other=0.0).to(tl.float32)
        at = candidates[:, None] * rank + rs[None, :]
        after = tl.load(successors + at, mask=(ks < CANDIDATES)[:, None] & (rs < rank)[None, :], other=0.0)
        fits = row_sums(after.to(tl.float32) * before[None, :], BLOCK, RANK)
        scores = tl.load(logits + row * CANDIDATES + ks, mask=ks < CANDIDATES, other=float("-inf"))
        best = tl.argmax(scores.to(tl.float32) + fits, 0)
        token = tl.sum(tl.where(ks == best, candidates, 0), 0)
        tl.store(chosen + row + 1 - FIRST, token)


def select_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    weighing: torch.Tensor,
    predecessors: torch.Tensor,
    successors: torch.Tensor,
    known: torch.Tensor,
    places: Places,
    chosen: torch.Tensor,
    *,
    from_anchor: bool = False,
) -> None:
    """Choose a token for each row of blocks but the first of each, one after the other; with `from_anchor` for that one
    too.

    logits, tokens: [n, candidates], the largest logits of each row, and int64 whose they are. weighing: [n, rank], what
    each row weighs the tokens' vectors by. predecessors, successors: [vocab, rank], with rank up to 1024. known:
    int64 [sessions], the token of each block's first row. places: where the blocks stand. chosen: int64 [n], gets the
    tokens, or [n + 1], where the first row's stands behind its place.
    """
    candidates, rank = logits.shape[1], predecessors.shape[1]
    together = places.sessions is not None
    _select[(len(known),)](
        logits, tokens, weighing, predecessors, successors, known, places.lines, chosen, places.lines.stride(0), rank,
        FIRST=int(not from_anchor), TOGETHER=together, CANDIDATES=candidates, BLOCK=triton.next_power_of_2(candidates),
        RANK=triton.next_power_of_2(rank), num_warps=4,
    )  # fmt: skip
