"""The RMSNorm of what a sublayer makes, which is then added to the residual stream, and the next norm's beginning."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.matmul import (
    SQUARES_WIDTH,
    Normed,
    norm_factors,
    store_sums,
    sums_for,
    with_factors,
)
from shard_worker.model.kernels.sums import whole_sum
from shard_worker.weights.weight import Weight

_COLUMNS = 1024


@triton.jit
def _normed(
    made, squares, at, kept, ms, rows, width, eps, kind: tl.constexpr, NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr
):
    """Return columns of a row of `made` behind their norm, rounded as the plain form does, in float32.

    squares: the sums of squares of the row's columns, NORMED of them; where NORMED is 0, its factor.
    """
    computed: tl.constexpr = NORMED == 0
    factor = tl.load(squares + ms) if computed else norm_factors(squares, ms, rows, width, eps, NORMED, NORM_BLOCK, 1)
    return (tl.load(made + at, mask=kept, other=0.0).to(tl.float32) * factor[:, None]).to(kind).to(tl.float32)


@triton.jit
def _add(
    normed, residual, scale, norm, beside, out, scaled, totals, next_sums, beside_scaled, beside_sums, block, ms, ns,
    at, kept, rows, width,
    SCALED: tl.constexpr, THEN: tl.constexpr, SUMMED: tl.constexpr, BESIDE: tl.constexpr, BESIDE_SUMMED: tl.constexpr,
    BLOCK: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Add BLOCK columns of a row [1, BLOCK] to the residual stream, and store what follows of it.

    THEN: another norm follows, so that scaled and totals are stored. SUMMED: so are the sums of columns. BESIDE,
    BESIDE_SUMMED: the same for another norm of the same rows.
    """
    kind = out.dtype.element_ty
    result = (tl.load(residual + at, mask=kept, other=0.0).to(tl.float32) + normed).to(kind)
    if SCALED:
        result = (result.to(tl.float32) * tl.load(scale).to(kind).to(tl.float32)).to(kind)
    tl.store(out + at, result, mask=kept)
    wide = result.to(tl.float32)
    if THEN:
        store_sums(wide * wide, totals, block, ms, rows, width, 1, BLOCK, SQUARES)
        result = (wide * tl.load(norm + ns, mask=ns < width, other=0.0)[None, :]).to(kind)
        tl.store(scaled + at, result, mask=kept)
    if SUMMED:
        store_sums(result.to(tl.float32), next_sums, block, ms, rows, width, 1, BLOCK, SQUARES)
    if BESIDE:
        result = (wide * tl.load(beside + ns, mask=ns < width, other=0.0)[None, :]).to(kind)
        tl.store(beside_scaled + at, result, mask=kept)
    if BESIDE_SUMMED:
        store_sums(result.to(tl.float32), beside_sums, block, ms, rows, width, 1, BLOCK, SQUARES)


@triton.jit
def _add_normed(
    made, squares, residual, scale, norm, beside, out, scaled, totals, next_sums, beside_scaled, beside_sums, rows,
    width, eps,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, SCALED: tl.constexpr, THEN: tl.constexpr, SUMMED: tl.constexpr,
    BESIDE: tl.constexpr, BESIDE_SUMMED: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of a row of out [rows, width], as `add_normed` says."""
    block = tl.program_id(1)
    ms, ns = tl.program_id(0) + tl.arange(0, 1), block * BLOCK + tl.arange(0, BLOCK)
    at, kept = ms[:, None] * width + ns[None, :], (ns < width)[None, :]
    normed = _normed(made, squares, at, kept, ms, rows, width, eps, out.dtype.element_ty, NORMED, NORM_BLOCK)
    _add(
        normed, residual, scale, norm, beside, out, scaled, totals, next_sums, beside_scaled, beside_sums, block, ms,
        ns, at, kept, rows, width, SCALED, THEN, SUMMED, BESIDE, BESIDE_SUMMED, BLOCK, SQUARES,
    )  # fmt: skip


@triton.jit
def _add_both(
    one, one_squares, other, other_squares, weight, residual, scale, norm, out, scaled, totals, next_sums, rows, width,
    eps, one_eps, other_eps,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, SCALED: tl.constexpr, THEN: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Compute a row of out [rows, width], as `add_both` says: a program has all of it, as the sum has a norm too."""
    ms, ns = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK)
    at, kept = ms[:, None] * width + ns[None, :], (ns < width)[None, :]
    kind = out.dtype.element_ty
    both = _normed(one, one_squares, at, kept, ms, rows, width, one_eps, kind, NORMED, NORM_BLOCK)
    both += _normed(other, other_squares, at, kept, ms, rows, width, other_eps, kind, NORMED, NORM_BLOCK)
    both = both.to(kind).to(tl.float32)
    factor = tl.rsqrt(whole_sum(both * both, BLOCK) / width + eps)
    normed = both * factor * tl.load(weight + ns, mask=ns < width, other=0.0)[None, :]
    _add(
        normed.to(kind).to(tl.float32), residual, scale, norm, None, out, scaled, totals, next_sums, None, None, 0, ms,
        ns, at, kept, rows, width, SCALED, THEN, SUMMED, False, False, BLOCK, SQUARES,
    )  # fmt: skip


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
    out, following, _ = _launch_add(made, residual, norm, eps, scale, then, None, None)
    return out, None if following is None else with_factors(following)


def add_normed_for_two(
    made: Normed,
    residual: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    *,
    then: tuple[Weight | None, Weight | None],
) -> tuple[torch.Tensor, Normed, Normed]:
    """Do as `add_normed` where the result goes through two norms beside each other, and each into products of its
    own."""
    out, following, beside = _launch_add(made, residual, norms[0], eps, None, then[0], norms[1], then[1])
    assert following is not None
    assert beside is not None
    following = with_factors(following)
    return out, following, replace(beside, factors=following.factors)


def _launch_add(
    made: Normed,
    residual: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    then: Weight | None,
    beside: torch.Tensor | None,
    beside_then: Weight | None,
) -> tuple[torch.Tensor, Normed | None, Normed | None]:
    """Do as `add_normed` says, without the factors of the norms that follow. beside: of the second one."""
    rows, width = residual.shape
    out, following = torch.empty_like(residual), _following(residual, norm, eps, then)
    second = _following(residual, beside, eps, beside_then)
    if second is not None and following is not None:
        second = replace(second, squares=following.squares)
    _add_normed[(rows, triton.cdiv(width, _COLUMNS))](
        made.scaled, _squares_or_factors(made), residual, scale, norm, beside, out, *_tensors_of(following),
        None if second is None else second.scaled, None if second is None else second.sums, rows, width, made.eps,
        **_constants(made, scale, following), BESIDE=second is not None,
        BESIDE_SUMMED=second is not None and second.sums is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out, following, second


def add_both(
    one: Normed,
    other: Normed,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    *,
    scale: torch.Tensor | None = None,
    then: Weight | None = None,
) -> tuple[torch.Tensor, Normed | None]:
    """Return residual [n, width] plus the RMSNorm, with `weight`, float32 [width], of the sum of two RMSNorms.

    one, other: the rows of these, as the products that made them give them, both with factors or both without. eps: of
    the norm of the sum as well. The rest is as of `add_normed`.
    """
    rows, width = residual.shape
    assert (one.factors is None) == (other.factors is None)
    out, following = torch.empty_like(residual), _following(residual, norm, eps, then)
    _add_both[(rows,)](
        one.scaled, _squares_or_factors(one), other.scaled, _squares_or_factors(other), weight, residual, scale, norm,
        out, *_tensors_of(following), rows, width, eps, one.eps, other.eps,
        **_constants(one, scale, following), BLOCK=max(SQUARES_WIDTH, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return out, None if following is None else with_factors(following)


def _following(residual: torch.Tensor, norm: torch.Tensor | None, eps: float, then: Weight | None) -> Normed | None:
    """Return where rows like the residual's go on their way through a norm; None without one."""
    if norm is None:
        return None
    rows, width = residual.shape
    totals = torch.empty((rows, triton.cdiv(width, SQUARES_WIDTH)), dtype=torch.float32, device=residual.device)
    sums = sums_for(then, residual.shape)
    return Normed(torch.empty_like(residual), totals, eps, sums=sums)


def _tensors_of(following: Normed | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return what kernels write for a norm that follows."""
    return (None, None, None) if following is None else (following.scaled, following.squares, following.sums)


def _constants(made: Normed, scale: torch.Tensor | None, following: Normed | None) -> dict[str, int | bool]:
    """Return what kernels know at compile time of the norm that is due, and of what follows."""
    parts = made.squares.shape[1]
    return {
        "NORMED": parts if made.factors is None else 0,
        "NORM_BLOCK": triton.next_power_of_2(parts),
        "SCALED": scale is not None,
        "THEN": following is not None,
        "SUMMED": following is not None and following.sums is not None,
        "SQUARES": SQUARES_WIDTH,
    }


def _squares_or_factors(made: Normed) -> torch.Tensor:
    """Return what kernels read of a norm that is due: each row's factor, where it is computed already."""
    return made.squares if made.factors is None else made.factors
