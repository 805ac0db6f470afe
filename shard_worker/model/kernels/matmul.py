"""Products of 1 to 512 rows with a large matrix, at the rate at which its weights can be read.

All rows of a tile share one pass over the weights, and a row's result does not depend on how many others there are: a
sum over the depth is cut into parts at places that follow from the matrix alone, each part is summed in order, and then
the parts are, by the program that holds them all or by the last one to arrive. Tiles of any shape keep that order.
What comes before and after a product in a layer (the RMSNorm's factor, bias, SwiGLU or GeGLU, residual) happens in the
same kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shard_worker.device import devices
from shard_worker.device.devices import product_precision
from shard_worker.model.kernels.codes import (
    Form,
    exchange_columns,
    form_of,
    group_sums,
    multiplies_together,
    packed_sums,
    wants_sums,
)
from shard_worker.model.kernels.elementwise import gated, geglu, swiglu
from shard_worker.model.kernels.heads import Heads, constants, finish_heads
from shard_worker.model.kernels.product_cuts import TILE_ROWS, UNIT, Config, choose, choose_packed
from shard_worker.model.kernels.sums import row_sums
from shard_worker.weights.tiled import TiledWeight
from shard_worker.weights.weight import ReorderedWeight, StackedWeight, Weight

_Given = torch.Tensor | None
GroupTensors = tuple[_Given, _Given, _Given, _Given, _Given]
"""As of `group_tensors`."""

NO_GROUPS: GroupTensors = (None, None, None, None, None)
"""Those of a dense matrix."""

_NO_HEADS = dict.fromkeys(
    (
        "HEADS", "KV_HEADS", "DIM", "ROTARY", "STRIDE", "LINE", "PAGE", "FLOAT8", "PAGES", "VALUE_NORM",
        "KEYS_AS_VALUES",
    ),
    0,
)  # fmt: skip
"""As of `constants`, where a product's tiles are not heads."""

_MAX_BLOCKS = 1 << 16

SQUARES_WIDTH = 32
"""Columns of a row whose squares are summed up first, for the RMSNorm that follows; and they themselves, for a packed
matrix with offsets that follows."""


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows that an RMSNorm is due on: multiplied by its weights already, but not by the factor of each row.

    scaled: [n, depth]. squares: float32 [n, depth / SQUARES_WIDTH], rounded up: the sums of so many columns' squares.
    factors: float32 [n], of each row, where they are computed already. sums: as of `Summed`, of what is in `scaled`.
    """

    scaled: torch.Tensor
    squares: torch.Tensor
    eps: float
    factors: torch.Tensor | None = None
    sums: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Summed:
    """Rows [n, depth], and the sums of every SQUARES_WIDTH of their columns, float32 [n, depth / SQUARES_WIDTH]."""

    rows: torch.Tensor
    sums: torch.Tensor


@triton.jit
def norm_factors(squares, ms, rows, depth, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr):
    """Return the RMSNorm's factor of rows ms, [HEIGHT]. BLOCK: PARTS or more, a power of two."""
    ps = tl.arange(0, BLOCK)
    mask = (ms < rows)[:, None] & (ps < PARTS)[None, :]
    parts = tl.load(squares + ms[:, None] * PARTS + ps[None, :], mask=mask, other=0.0)
    return tl.rsqrt(row_sums(parts, HEIGHT, BLOCK) / depth + eps)


@triton.jit
def store_sums(
    tile, sums, block, ms, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SUMS: tl.constexpr
):
    """Store the sums of every SUMS columns of a tile, float32 [BLOCK_ROWS, BLOCK_WIDTH]."""
    each: tl.constexpr = BLOCK_WIDTH // SUMS
    result = row_sums(tl.reshape(tile, (BLOCK_ROWS * each, SUMS)), BLOCK_ROWS * each, SUMS)
    parts = block * each + tl.arange(0, each)
    inside = (ms[:, None] < rows) & (parts[None, :] * SUMS < width)
    at = ms[:, None] * tl.cdiv(width, SUMS) + parts[None, :]
    tl.store(sums + at, tl.reshape(result, (BLOCK_ROWS, each)), mask=inside)


@triton.jit
def store_run_sums(x, sums, run, COUNT: tl.constexpr, SUMS: tl.constexpr):
    """Store the sums of every SUMS numbers of x [COUNT], which are a run of that number among those of a row."""
    each: tl.constexpr = COUNT // SUMS
    result = row_sums(tl.reshape(x.to(tl.float32), (each, SUMS)), each, SUMS)
    tl.store(sums + run * each + tl.arange(0, each), result)


@triton.jit
def sum_of_parts(
    total, other, partial, arrived, tile, part,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SPLIT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Leave a part of a tile's sums, both float32 [BLOCK_ROWS, BLOCK_WIDTH], where the program that comes last finds
    it. Return whether this is that one, and then the sums of all parts in order. PAIRED: `other` counts too.

    partial: memory for the parts of all tiles. arrived: counts of parts, one for each tile.
    """
    size: tl.constexpr = BLOCK_ROWS * BLOCK_WIDTH
    step: tl.constexpr = size * 2 if PAIRED else size
    parts = partial + (tile * SPLIT).to(tl.int64) * step
    inner = tl.arange(0, BLOCK_ROWS)[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    tl.store(parts + part * step + inner, total)
    if PAIRED:
        tl.store(parts + part * step + size + inner, other)
    # All of this tile's parts are written before it counts itself.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        other = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        for turn in tl.static_range(SPLIT):
            total += tl.load(parts + turn * step + inner, cache_modifier=".cg")
            if PAIRED:
                other += tl.load(parts + turn * step + size + inner, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return last, total, other


@triton.jit
def _finish(
    acc, other, out, squares, bias, residual, norm, scaled, totals, next_sums, cos, sin, lines, sessions, indices, slot,
    block, first_block, ms, ns, rows, width, stride, depth, eps, next_eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, SQUARES: tl.constexpr,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, PAIRED: tl.constexpr,
    GELU: tl.constexpr, THEN: tl.constexpr, SUMMED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, STRIDE: tl.constexpr, LINE: tl.constexpr, PAGE: tl.constexpr,
    FLOAT8: tl.constexpr, PAGES: tl.constexpr, VALUE_NORM: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
):  # fmt: skip
    """Do what follows the sums of a tile: the norm's factor, bias, SwiGLU or GeGLU, residual, the next norm's
    beginning, and sums for the next product. ADDED: 1 where the residual is added, 2 where the result gates it."""
    kept = (ms[:, None] < rows) & (ns[None, :] < width)
    at = ms[:, None] * width + ns[None, :]
    kind = out.dtype.element_ty
    if NORMED >= 0:
        if NORMED > 0:
            factor = norm_factors(squares, ms, rows, depth, eps, NORMED, NORM_BLOCK, BLOCK_ROWS)
        else:
            factor = tl.load(squares + ms, mask=ms < rows, other=0.0)
        acc *= factor[:, None]
        if PAIRED:
            other *= factor[:, None]
    if BIASED:
        acc += tl.load(bias + ns, mask=ns < width, other=0.0).to(tl.float32)[None, :]
    if PAIRED:
        acc = gated(acc, other, GELU)
    if ADDED == 2:
        acc = gated(acc.to(kind).to(tl.float32), tl.load(residual + at, mask=kept, other=0.0).to(tl.float32), GELU)
    elif ADDED == 1:
        # Rounded before it is added, as a product of its own would be.
        acc = acc.to(kind).to(tl.float32) + tl.load(residual + at, mask=kept, other=0.0).to(tl.float32)
    if DIM > 0:
        finish_heads(
            acc, out, norm, cos, sin, lines, sessions, indices, slot, next_eps, first_block + block, ms, rows,
            BLOCK_ROWS, HEADS, KV_HEADS, DIM, ROTARY, STRIDE, LINE, PAGE, FLOAT8, PAGES, VALUE_NORM,
            KEYS_AS_VALUES,
        )  # fmt: skip
    else:
        tl.store(out + ms[:, None] * stride + ns[None, :], acc.to(kind), mask=kept)
    result = acc.to(kind)
    if THEN:
        acc = tl.where(kept, result.to(tl.float32), 0.0)
        factors = tl.load(norm + ns, mask=ns < width, other=0.0)
        result = (acc * factors[None, :]).to(kind)
        tl.store(scaled + at, result, mask=kept)
        store_sums(acc * acc, totals, block, ms, rows, width, BLOCK_ROWS, BLOCK_WIDTH, SQUARES)
    if SUMMED:
        store_sums(
            tl.where(kept, result.to(tl.float32), 0.0),
            next_sums,
            block,
            ms,
            rows,
            width,
            BLOCK_ROWS,
            BLOCK_WIDTH,
            SQUARES,
        )


@triton.jit(do_not_specialize=["rows", "slot", "tiles", "first_block"])
def _product(
    x, weight, scales, scale_factors, offsets, offset_factors, sums, out, squares, bias, residual, norm, scaled, totals,
    next_sums, cos, sin, lines, sessions, indices, slot, partial, arrived, rows, tiles, width, stride, depth,
    first_block, eps, next_eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, SERIAL: tl.constexpr, DESCRIPTORS: tl.constexpr, SWAPPED: tl.constexpr, ALONE: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, EVEN_DEPTH: tl.constexpr, SQUARES: tl.constexpr,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, PAIRED: tl.constexpr,
    GELU: tl.constexpr, THEN: tl.constexpr, SUMMED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, STRIDE: tl.constexpr, LINE: tl.constexpr, PAGE: tl.constexpr,
    FLOAT8: tl.constexpr, PAGES: tl.constexpr, VALUE_NORM: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, WARPS: tl.constexpr, TOGETHER: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out [rows, width], x [rows, depth] times weight [width, depth] transposed, or part of its sum.

    tiles: of rows; those that share weights are neighbours. ALONE: there is but one. PAIRED: weight has 2 * width rows,
    gates before ups. stride: from one row of out to the next. first_block: of heads, what comes before this weight's.
    SERIAL, DESCRIPTORS, SWAPPED: as of `Config`. FORM: of a packed weight, whose codes are in `weight`, or None.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    block = tile // tiles
    inside, ks = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DEPTH)
    ms = tile % tiles * BLOCK_ROWS + inside
    ns = block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    share = tl.cdiv(tl.cdiv(depth, UNIT), SPLIT) * UNIT
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    other_total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    if FORM is not None:
        height = width * 2 if PAIRED else width
        if SERIAL:
            for turn in range(SPLIT):
                acc, other = packed_sums(
                    x, weight, scales, scale_factors, offsets, offset_factors, sums, ms, block, turn * share,
                    tl.minimum(turn * share + share, depth), rows, 0, height, width, depth, BLOCK_ROWS, BLOCK_WIDTH,
                    BLOCK_DEPTH, STAGES, WARPS, TOGETHER, PAIRED, PRECISION, FORM,
                )  # fmt: skip
                total += acc
                other_total += other
        else:
            total, other_total = packed_sums(
                x, weight, scales, scale_factors, offsets, offset_factors, sums, ms, block, part * share,
                tl.minimum(part * share + share, depth), rows, 0, height, width, depth, BLOCK_ROWS, BLOCK_WIDTH,
                BLOCK_DEPTH, STAGES, WARPS, TOGETHER, PAIRED, PRECISION, FORM,
            )  # fmt: skip
    else:
        for turn in tl.static_range(SPLIT if SERIAL else 1):
            first = (part + turn) * share
            last = tl.minimum(first + share, depth)
            acc = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
            other = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
            if SWAPPED:
                transposed = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
                other_transposed = tl.zeros((BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
                for k in tl.range(first, last, BLOCK_DEPTH, num_stages=STAGES):
                    x_tile = x.load([tile % tiles * BLOCK_ROWS, k]).T
                    transposed = tl.dot(
                        weight.load([block * BLOCK_WIDTH, k]), x_tile, transposed, input_precision=PRECISION
                    )
                    if PAIRED:
                        u_tile = weight.load([block * BLOCK_WIDTH + width, k])
                        other_transposed = tl.dot(u_tile, x_tile, other_transposed, input_precision=PRECISION)
                acc, other = transposed.T, other_transposed.T
            elif DESCRIPTORS:
                for k in tl.range(first, last, BLOCK_DEPTH, num_stages=STAGES):
                    x_tile = x.load([tile % tiles * BLOCK_ROWS, k])
                    acc = tl.dot(x_tile, weight.load([block * BLOCK_WIDTH, k]).T, acc, input_precision=PRECISION)
                    if PAIRED:
                        u_tile = weight.load([block * BLOCK_WIDTH + width, k])
                        other = tl.dot(x_tile, u_tile.T, other, input_precision=PRECISION)
            else:
                # The last block reads some rows twice rather than rows that are not there.
                held = ns if EVEN_WIDTH else tl.minimum(ns, width - 1)
                x_at = x + ms[:, None] * depth + first + ks[None, :]
                w_at = (weight + held.to(tl.int64) * depth + first)[None, :] + ks[:, None]
                present = (ms < rows)[:, None]
                # Read once, unless neighbours read it too.
                evict: tl.constexpr = "evict_first" if ALONE else ""
                for k in tl.range(first, last, BLOCK_DEPTH, num_stages=STAGES):
                    if EVEN_DEPTH:
                        x_tile = tl.load(x_at, mask=present, other=0.0)
                        w_tile = tl.load(w_at, eviction_policy=evict)
                    else:
                        x_tile = tl.load(x_at, mask=present & (k + ks < last)[None, :], other=0.0)
                        w_tile = tl.load(w_at, mask=(k + ks < last)[:, None], other=0.0)
                    acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
                    if PAIRED:
                        u_at = w_at + width.to(tl.int64) * depth
                        u_tile = (
                            tl.load(u_at, eviction_policy=evict)
                            if EVEN_DEPTH
                            else tl.load(u_at, mask=(k + ks < last)[:, None], other=0.0)
                        )
                        other = tl.dot(x_tile, u_tile, other, input_precision=PRECISION)
                    x_at += BLOCK_DEPTH
                    w_at += BLOCK_DEPTH
            total += acc
            other_total += other

    if SPLIT == 1 or SERIAL:
        _finish(
            total, other_total, out, squares, bias, residual, norm, scaled, totals, next_sums, cos, sin, lines,
            sessions, indices, slot, block, first_block, ms, ns, rows, width, stride, depth, eps, next_eps, BLOCK_ROWS,
            BLOCK_WIDTH, SQUARES, NORMED, NORM_BLOCK, BIASED, ADDED, PAIRED, GELU, THEN, SUMMED, HEADS, KV_HEADS, DIM,
            ROTARY, STRIDE, LINE, PAGE, FLOAT8, PAGES, VALUE_NORM, KEYS_AS_VALUES,
        )  # fmt: skip
    else:
        last, total, other_total = sum_of_parts(
            total, other_total, partial, arrived, tile, part, BLOCK_ROWS, BLOCK_WIDTH, SPLIT, PAIRED
        )
        if last:
            _finish(
                total, other_total, out, squares, bias, residual, norm, scaled, totals, next_sums, cos, sin, lines,
                sessions, indices, slot, block, first_block, ms, ns, rows, width, stride, depth, eps, next_eps,
                BLOCK_ROWS, BLOCK_WIDTH, SQUARES, NORMED, NORM_BLOCK, BIASED, ADDED, PAIRED, GELU, THEN, SUMMED, HEADS,
                KV_HEADS, DIM, ROTARY, STRIDE, LINE, PAGE, FLOAT8, PAGES, VALUE_NORM, KEYS_AS_VALUES,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Around:
    """What happens around a product, as of `linear`.

    source: what is multiplied. normed: the same where a norm is due on it. sums: as of `Summed`, where a weight wants
    them. following: where the result's rows go on their way into the next product.
    """

    source: torch.Tensor
    normed: Normed | None
    sums: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    gates_residual: bool
    paired: bool
    gelu: bool
    norm: torch.Tensor | None
    eps: float
    heads: Heads | None
    following: Normed | Summed | None


def linear(
    x: torch.Tensor | Normed | Summed,
    weight: torch.Tensor | Weight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gates_residual: bool = False,
    paired: bool = False,
    gelu: bool = False,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    heads: Heads | None = None,
    then: Weight | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Normed | Summed | None]:
    """Return x [n, depth] times weight [width, depth] transposed, and the rows on their way into what follows.

    bias: [width]. residual: [n, width], added at the end. gates_residual: it is multiplied by SiLU of the result
    instead. paired: weight is [2 * width, depth], and the result is silu(first half) * second half. gelu: with GELU in
    SiLU's place, in tanh's form. norm: float32 [width], of the RMSNorm that the result goes through next. heads: the
    result is queries (and gates), [n, heads.shape.stride]; keys and values go into the session's pages. eps: of either
    norm that comes after the product. then: what the rows are multiplied by next, where that is known: they are given
    with the sums that it wants. out: memory for the result, where it is not to have its own. config: how the product is
    cut, None for what `choose` says. A weight whose parts have unlike forms takes a launch for each; it has no residual
    and no norm.
    """
    source = x.scaled if isinstance(x, Normed) else x.rows if isinstance(x, Summed) else x
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    rows, total = len(source), row_count(weight)
    if paired and len(parts) > 1:
        # Gates and ups have unlike forms: they meet behind the products.
        gate = geglu if gelu else swiglu
        return gate(linear(x, weight, bias=bias, eps=eps)[0]), None
    width = total // 2 if paired else total
    stride = width if heads is None else heads.shape.stride
    out = torch.empty((rows, stride), dtype=source.dtype, device=source.device) if out is None else out
    sums_shape = (rows, triton.cdiv(width, SQUARES_WIDTH))
    next_sums = sums_for(then, (rows, width))
    following: Normed | Summed | None = None
    if norm is not None:
        totals = torch.empty(sums_shape, dtype=torch.float32, device=source.device)
        following = Normed(torch.empty_like(out), totals, eps, sums=next_sums)
    elif next_sums is not None:
        following = Summed(out, next_sums)
    assert len(parts) == 1 or (residual is None and following is None)
    sums = None if isinstance(x, torch.Tensor) else x.sums
    if sums is None and any(isinstance(part, Weight) and wants_sums(part) for part in parts):
        sums = group_sums(source, SQUARES_WIDTH)
    around = _Around(
        source, x if isinstance(x, Normed) else None, sums, bias, residual, gates_residual, paired, gelu, norm, eps,
        heads, following,
    )  # fmt: skip
    first = 0
    for part in parts:
        _multiply(around, part, out if heads is not None else out[:, first:], first, config)
        first += row_count(part)
    return out, with_factors(following) if isinstance(following, Normed) else following


def _multiply(
    around: _Around, weight: torch.Tensor | Weight, out: torch.Tensor, first: int, config: Config | None
) -> None:
    """Launch the product with a weight of one form. first: how many rows of weights come before."""
    heads, residual, normed, sums = around.heads, around.residual, around.normed, around.sums
    following = around.following if isinstance(around.following, Normed) else None
    source, next_sums = around.source, None if around.following is None else around.following.sums
    if isinstance(weight, ReorderedWeight):
        source, sums, weight = source.index_select(1, weight.order), None, weight.weight
    rows, depth = source.shape
    target, size = devices.kernel_target(source.device), source.dtype.itemsize
    shape, places = (None, None) if heads is None else (heads.shape, heads.places)
    dim = None if shape is None else shape.dim
    width = row_count(weight) // (2 if around.paired else 1)
    packed = weight if isinstance(weight, TiledWeight) else None
    form = None if packed is None else form_of(packed)
    if config is None and form is not None:
        config = choose_packed(form, width, depth, around.paired, dim, size, target, rows)
    config = config or choose(width, depth, around.paired, dim, size, target, rows)
    blocks, tiles = triton.cdiv(width, config.width), triton.cdiv(rows, config.height)
    partial, programs = out, 1 if config.serial else config.split
    if programs > 1:
        each = config.height * config.width * (2 if around.paired else 1)
        partial = torch.empty(blocks * tiles * programs * each, dtype=torch.float32, device=source.device)
    squares = None if normed is None else normed.squares if normed.factors is None else normed.factors
    bias = None if around.bias is None else around.bias[first : first + width]
    read_x = source
    groups = NO_GROUPS
    together = multiplies_together(target, config.width, config.height, config.warps)
    if packed is not None and form is not None:
        read_weight = packed.codes.view(torch.int32)
        groups = group_tensors(packed, form, source, sums)
        read_x = exchange_columns(source, form, together=together)
    else:
        read_weight = weight if isinstance(weight, torch.Tensor) else weight.tensor
    if config.descriptors:
        read_x = TensorDescriptor.from_tensor(source, [config.height, config.depth])
        read_weight = TensorDescriptor.from_tensor(read_weight, [config.width, config.depth])
    _product[(blocks * tiles, programs)](
        read_x, read_weight, *groups, out, squares, bias, residual,
        around.norm if heads is None else heads.norms,
        following.scaled if following else None, following.squares if following else None, next_sums,
        heads.cos if heads else None, heads.sin if heads else None,
        places.lines if places else None, places.sessions if places else None, places.indices if places else None,
        heads.slot if heads else 0, partial, arrivals(source.device),
        rows, tiles, width, out.stride(0), depth, first // shape.dim if shape else 0,
        normed.eps if normed else 0.0, around.eps,
        BLOCK_ROWS=config.height, BLOCK_WIDTH=config.width, BLOCK_DEPTH=config.depth, UNIT=UNIT, SPLIT=config.split,
        SERIAL=config.serial, DESCRIPTORS=config.descriptors, SWAPPED=config.swapped, ALONE=tiles == 1,
        STAGES=config.stages,
        EVEN_WIDTH=width % config.width == 0, EVEN_DEPTH=depth % config.depth == 0, SQUARES=SQUARES_WIDTH,
        NORMED=-1 if normed is None else normed.squares.shape[1] if normed.factors is None else 0,
        NORM_BLOCK=1 if normed is None else triton.next_power_of_2(normed.squares.shape[1]),
        BIASED=bias is not None, ADDED=0 if residual is None else 2 if around.gates_residual else 1,
        PAIRED=around.paired, GELU=around.gelu, THEN=around.norm is not None, SUMMED=next_sums is not None,
        **(_NO_HEADS if heads is None else constants(heads.shape, heads.places)),
        PRECISION=product_precision(source), WARPS=config.warps,
        TOGETHER=together, FORM=form,
        num_warps=config.warps,
    )  # fmt: skip


def group_tensors(weight: TiledWeight, form: Form, x: torch.Tensor, sums: torch.Tensor | None) -> GroupTensors:
    """Return what kernels take of a packed matrix beside its codes: scales and their factors, offsets and theirs, and
    the sums of the rows x that these are multiplied by; None for what there is not.

    sums: as of `Summed`, where they are there.
    """
    scales, offsets = weight.scales, weight.offsets
    if offsets is None:
        return scales.words, scales.factors, None, None, None
    if sums is None or form.sums != SQUARES_WIDTH:
        sums = group_sums(x, form.sums)
    return scales.words, scales.factors, offsets.words, offsets.factors, sums


def sums_for(weight: Weight | None, shape: Sequence[int], run: int = SQUARES_WIDTH) -> torch.Tensor | None:
    """Return memory for the sums, as of `Summed`, that a matrix wants of rows [n, columns]; None where it wants none.

    weight: what the rows are multiplied by next, None where that is not known. shape: of the rows. run: how many of
    their columns are computed at once; where that leaves a sum in two parts, None is returned too.
    """
    if weight is None or not wants_sums(weight) or run % SQUARES_WIDTH:
        return None
    rows, columns = shape
    return torch.empty((rows, triton.cdiv(columns, SQUARES_WIDTH)), dtype=torch.float32, device=weight.device)


def row_count(weight: torch.Tensor | Weight) -> int:
    """Return the rows of a matrix."""
    return len(weight) if isinstance(weight, torch.Tensor) else weight.rows


@triton.jit
def _begin(x, norm, scaled, totals, rows, depth, BLOCK: tl.constexpr, SQUARES: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    ks = block * BLOCK + tl.arange(0, BLOCK)
    inside = ks < depth
    wide = tl.load(x + row * depth + ks, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(norm + ks, mask=inside, other=0.0)
    tl.store(scaled + row * depth + ks, (wide * factors).to(scaled.dtype.element_ty), mask=inside)
    sums = row_sums(tl.reshape(wide * wide, (BLOCK // SQUARES, SQUARES)), BLOCK // SQUARES, SQUARES)
    parts = block * (BLOCK // SQUARES) + tl.arange(0, BLOCK // SQUARES)
    tl.store(totals + row * tl.cdiv(depth, SQUARES) + parts, sums, mask=parts * SQUARES < depth)


def begin(x: torch.Tensor, norm: torch.Tensor, eps: float) -> Normed:
    """Begin the RMSNorm of rows [n, depth] with float32 weights [depth], as the product that made them would have."""
    rows, depth = x.shape
    totals = torch.empty((rows, triton.cdiv(depth, SQUARES_WIDTH)), dtype=torch.float32, device=x.device)
    made = Normed(torch.empty_like(x), totals, eps)
    _begin[(rows, triton.cdiv(depth, 1024))](
        x, norm, made.scaled, made.squares, rows, depth, BLOCK=1024, SQUARES=SQUARES_WIDTH, num_warps=4
    )
    return with_factors(made)


@triton.jit
def _factors(squares, factors, rows, depth, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    ms = tl.program_id(0) + tl.arange(0, 1)
    tl.store(factors + ms, norm_factors(squares, ms, rows, depth, eps, PARTS, BLOCK, 1))


def with_factors(normed: Normed) -> Normed:
    """Compute the factors once where there are many rows, rather than in every program of the product that follows."""
    return normed if len(normed.squares) <= TILE_ROWS else replace(normed, factors=row_factors(normed))


def row_factors(normed: Normed) -> torch.Tensor:
    """Return the RMSNorm's factor of each row, float32 [n]."""
    if normed.factors is not None:
        return normed.factors
    rows, parts = normed.squares.shape
    factors = torch.empty(rows, dtype=torch.float32, device=normed.squares.device)
    depth, block = normed.scaled.shape[1], triton.next_power_of_2(parts)
    _factors[(rows,)](normed.squares, factors, rows, depth, normed.eps, PARTS=parts, BLOCK=block, num_warps=1)
    return factors


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Return counts of parts that have arrived, int32 [blocks]; each kernel leaves zeros behind."""
    return torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device)
