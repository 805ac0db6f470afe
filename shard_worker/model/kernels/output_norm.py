"""The RMSNorm of what a sublayer makes, which is then added to the residual stream, and the next norm's beginning."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.codes import wants_sums
from shard_worker.model.kernels.matmul import SQUARES_WIDTH, Normed, norm_factors, store_sums, with_factors
from shard_worker.weights.weight import Weight

_COLUMNS = 1024


@triton.jit
def _add_normed(
    made, squares, residual, scale, norm, out, scaled, totals, next_sums, rows, width, eps,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, SCALED: tl.constexpr, THEN: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of a row of out [rows, width], as `add_normed` says.

    squares: the sums of squares of every SQUARES columns of `made`, NORMED of them a row; where NORMED is 0, each row's
    factor. THEN: another norm follows, so that scaled and totals are stored. SUMMED: so are the sums of columns.
    """
    block = tl.program_id(1)
    ms, ns = tl.program_id(0) + tl.arange(0, 1), block * BLOCK + tl.arange(0, BLOCK)
    at, kept = ms[:, None] * width + ns[None, :], (ns < width)[None, :]
    kind = out.dtype.element_ty
    computed: tl.constexpr = NORMED == 0
    factor = tl.load(squares + ms) if computed else norm_factors(squares, ms, rows, width, eps, NORMED, NORM_BLOCK, 1)
    # Rounded wherever the plain form rounds.
    normed = (tl.load(made + at, mask=kept, other=0.0).to(tl.float32) * factor[:, None]).to(kind).to(tl.float32)
    result = (tl.load(residual + at, mask=kept, other=0.0).to(tl.float32) + normed).to(kind)
    if SCALED:
        result = (result.to(tl.float32) * tl.load(scale).to(kind).to(tl.float32)).to(kind)
    tl.store(out + at, result, mask=kept)
    if THEN:
        wide = result.to(tl.float32)
        store_sums(wide * wide, totals, block, ms, rows, width, 1, BLOCK, SQUARES)
        result = (wide * tl.load(norm + ns, mask=ns < width, other=0.0)[None, :]).to(kind)
        tl.store(scaled + at, result, mask=kept)
    if SUMMED:
        store_sums(result.to(tl.float32), next_sums, block, ms, rows, width, 1, BLOCK, SQUARES)


def add_normed(
    made: Normed,
    residual: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    *,
    scale: torch.Tensor | None = None,
    then: Weight | None = None,
) -> tuple[torch.Tensor, Normed | None]:
    """Return residual [n, width] plus the RMSNorm of rows, times `scale`, and the same on its way into what follows.

    made: the rows [n, width], as the product that made them gives them. norm: float32 [width], of the RMSNorm that the
    result goes through next, None where none does. eps: of that one. scale: of one element. then: as of `linear`.
    """
    rows, width = residual.shape
    out = torch.empty_like(residual)
    sums_shape, following, next_sums = (rows, triton.cdiv(width, SQUARES_WIDTH)), None, None
    if norm is not None:
        totals = torch.empty(sums_shape, dtype=torch.float32, device=residual.device)
        if then is not None and wants_sums(then):
            next_sums = torch.empty_like(totals)
        following = Normed(torch.empty_like(residual), totals, eps, sums=next_sums)
    squares = made.squares if made.factors is None else made.factors
    parts = made.squares.shape[1]
    _add_normed[(rows, triton.cdiv(width, _COLUMNS))](
        made.scaled, squares, residual, scale, norm, out, following.scaled if following else None,
        following.squares if following else None, next_sums, rows, width, made.eps,
        NORMED=parts if made.factors is None else 0, NORM_BLOCK=triton.next_power_of_2(parts),
        SCALED=scale is not None, THEN=following is not None, SUMMED=next_sums is not None,
        BLOCK=_COLUMNS, SQUARES=SQUARES_WIDTH, num_warps=4,
    )  # fmt: skip
    return out, None if following is None else with_factors(following)
