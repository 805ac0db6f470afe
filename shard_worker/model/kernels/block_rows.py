"""The rows that a draft's blocks begin with: of each session the known token's embedding, and behind it the mask
token's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import Places

_COLUMNS = 1024


@triton.jit
def _block_rows(known, mask, sessions, indices, out, hidden, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    session, index = 0, row
    if TOGETHER:
        session = tl.maximum(tl.load(sessions + row), 0).to(tl.int32)
        index = tl.load(indices + row).to(tl.int32)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    own = tl.load(known + session * hidden + columns, mask=inside & (index == 0), other=0.0)
    others = tl.load(mask + columns, mask=inside & (index != 0), other=0.0)
    tl.store(out + row * hidden + columns, tl.where(index == 0, own, others), mask=inside)


def block_rows(known: torch.Tensor, mask: torch.Tensor, places: Places, rows: int) -> torch.Tensor:
    """Return the rows [rows, hidden] of all sessions' blocks.

    known: [sessions, hidden], the embedding of each session's known token. mask: that of the mask token, [hidden].
    """
    hidden = known.shape[1]
    out = torch.empty((rows, hidden), dtype=known.dtype, device=known.device)
    _block_rows[(rows, triton.cdiv(hidden, _COLUMNS))](
        known, mask, places.sessions, places.indices, out, hidden,
        TOGETHER=places.sessions is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
