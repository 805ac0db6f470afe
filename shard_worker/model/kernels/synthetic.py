"""What `shard_worker.model.synthetic_acceptance` chooses, for the rows of a step on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import BASE, ROWS, Places
from shard_worker.model.synthetic_acceptance import DRAWS, SPREAD, SyntheticAcceptance


@triton.jit(do_not_specialize=["line", "rows", "vocab"])
def _choose(
    lines, line, sessions, indices, tokens, chosen, refused, rows, vocab,
    TOGETHER: tl.constexpr, DRAWS: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    index = row.to(tl.int64)
    if TOGETHER:
        session = tl.load(sessions + row, mask=is_row, other=-1)
        is_row = is_row & (session >= 0)
        index = tl.load(indices + row, mask=is_row, other=0)
        lines += tl.where(is_row, session, 0) * line
    else:
        lines += index * 0
    is_followed = is_row & (index + 1 < tl.load(lines + ROWS, mask=is_row, other=0))
    position = tl.load(lines + BASE, mask=is_followed, other=0) + index + 1
    draft_token = tl.load(tokens + row + 1, mask=is_followed, other=0)
    is_refused = tl.load(refused + (position * SPREAD + draft_token) % DRAWS, mask=is_followed, other=0)
    tl.store(chosen + row, (draft_token + is_refused) % vocab, mask=is_followed)


def choose(synthetic: SyntheticAcceptance, tokens: torch.Tensor, places: Places, chosen: torch.Tensor) -> None:
    """Replace what was chosen behind each row that a row of the same session follows.

    tokens: int64, of the rows that `places` describes. chosen: int64 [rows], which is written to.
    """
    rows = len(chosen)
    _choose[(triton.cdiv(rows, 64),)](
        places.lines, places.line, places.sessions, places.indices, tokens, chosen, synthetic.refused, rows,
        synthetic.vocab_size, TOGETHER=places.sessions is not None, DRAWS=DRAWS, SPREAD=SPREAD, BLOCK=64,
    )  # fmt: skip
