"""The convolutions over a block's rows before and behind a sublayer, with what lies between them and the products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.matmul import Normed, row_factors
from shard_worker.model.kernels.step_parameters import Places

_COLUMNS = 512


@triton.jit
def _convolve(
    x, factors, added, base, residual, indices, out, hidden, groups,
    SIDE: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    index = row
    if TOGETHER:
        # That of a row of nobody may be anything.
        index = tl.minimum(tl.load(indices + row).to(tl.int32), row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    dtype = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        there = index >= tap
        earlier = tl.where(there, row - tap, row)
        value = tl.load(x + earlier * hidden + columns, mask=inside & there, other=0.0).to(tl.float32)
        if SCALED:
            value = (value * tl.load(factors + earlier)).to(dtype).to(tl.float32)
        at = SIDE * TAPS + tap
        kernel = tl.load(base + at * hidden + columns, mask=inside, other=0.0)
        kernel += tl.load(added + (row * 2 * TAPS + at) * groups + columns // GROUP, mask=inside, other=0.0)
        total += value * kernel
    if RESIDUAL:
        total = total.to(dtype) + tl.load(residual + row * hidden + columns, mask=inside, other=0.0)
    tl.store(out + row * hidden + columns, total.to(dtype), mask=inside)


def convolve(
    x: torch.Tensor | Normed,
    added: torch.Tensor,
    base: torch.Tensor,
    side: int,
    places: Places,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows x [n, hidden] of blocks, each the sum of itself and those before it in its block, by its kernels.

    added: [n, 2 * taps * groups], of both sides, what is added to base, float32 [2, taps, hidden]. side: 0 before a
    sublayer, 1 behind it. places: where the rows stand. residual: [n, hidden], added at the end.
    """
    source = x.scaled if isinstance(x, Normed) else x
    rows, hidden = source.shape
    taps = base.shape[1]
    groups = added.shape[1] // (2 * taps)
    out = torch.empty_like(source)
    factors = row_factors(x) if isinstance(x, Normed) else None
    _convolve[(rows, triton.cdiv(hidden, _COLUMNS))](
        source, factors, added, base, residual, places.indices, out, hidden, groups,
        SIDE=side, TAPS=taps, GROUP=hidden // groups, SCALED=factors is not None, RESIDUAL=residual is not None,
        TOGETHER=places.indices is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
