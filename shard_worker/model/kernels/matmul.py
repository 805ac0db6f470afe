"""Products of a few rows with a large matrix, at the rate at which its weights can be read.

All rows of a tile share one pass over the weights, and a row's result does not depend on how many others there are:
one row is computed as 16 are, and more are several times 16. What comes before and after a product in a layer (the
RMSNorm's factor, bias, SwiGLU, residual) happens in the same kernel. Where blocks share an output, the last one to
arrive adds the parts up, in order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shard_worker.device import devices
from shard_worker.device.devices import KernelTarget, product_precision
from shard_worker.model.kernels.heads import Heads, finish_heads

_MAX_BLOCKS = 1 << 16

_TILE_ROWS = 16
"""Tiles of another height are other matrix instructions, or are spread over a program's warps in another way: sums then
differ in the last bit."""


class Config(NamedTuple):
    """How a product is cut.

    width, depth: of a tile of weights. split: programs that share an output tile. warps: of a program. stages: tiles
    that are on their way at a time.
    """

    width: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows that an RMSNorm is due on: multiplied by its weights already, but not by the factor of each row.

    scaled: [n, depth]. squares: float32 [parts, n], whose sum over the parts is that of the row's squares.
    """

    scaled: torch.Tensor
    squares: torch.Tensor
    eps: float


@triton.jit
def _factor(squares, ms, rows, depth, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the RMSNorm's factor of rows ms."""
    ps = tl.arange(0, BLOCK)
    mask = (ps < PARTS)[:, None] & (ms < rows)[None, :]
    parts = tl.load(squares + ps[:, None] * rows + ms[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(parts, 0) / depth + eps)


@triton.jit
def _finish(
    acc, other, out, squares, bias, residual, norm, scaled, totals, cos, sin, parameters, slot, block, ms, ns, rows,
    width, depth, eps, next_eps,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, PAIRED: tl.constexpr,
    THEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    STRIDE: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Do what follows the sums of a tile: the norm's factor, bias, SwiGLU, residual, and the next norm's beginning."""
    kept = (ms[:, None] < rows) & (ns[None, :] < width)
    at = ms[:, None] * width + ns[None, :]
    kind = out.dtype.element_ty
    if NORMED > 0:
        factor = _factor(squares, ms, rows, depth, eps, NORMED, NORM_BLOCK)
        acc *= factor[:, None]
        if PAIRED:
            other *= factor[:, None]
    if BIASED:
        acc += tl.load(bias + ns, mask=ns < width, other=0.0).to(tl.float32)[None, :]
    if PAIRED:
        acc = acc / (1.0 + tl.exp(-acc)) * other
    if ADDED:
        # Rounded before it is added, as a product of its own would be.
        acc = acc.to(kind).to(tl.float32) + tl.load(residual + at, mask=kept, other=0.0).to(tl.float32)
    if DIM > 0:
        finish_heads(
            acc, out, norm, cos, sin, parameters, slot, next_eps, block, ms, rows, HEADS, KV_HEADS, DIM, ROTARY, STRIDE,
            PAGE, RING, FLOAT8,
        )  # fmt: skip
    else:
        tl.store(out + at, acc.to(kind), mask=kept)
    if THEN:
        acc = tl.where(kept, acc.to(kind).to(tl.float32), 0.0)
        factors = tl.load(norm + ns, mask=ns < width, other=0.0)
        tl.store(scaled + at, (acc * factors[None, :]).to(kind), mask=kept)
        tl.store(totals + block * rows + ms, tl.sum(acc * acc, 1), mask=ms < rows)


@triton.jit(do_not_specialize=["rows", "slot"])
def _product(
    x, weight, out, squares, bias, residual, norm, scaled, totals, cos, sin, parameters, slot, partial, arrived,
    rows, width, depth, eps, next_eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, EVEN_WIDTH: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, PAIRED: tl.constexpr,
    THEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    STRIDE: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out [rows, width], x [rows, depth] times weight [width, depth] transposed, or part of its sum.

    PAIRED: weight has 2 * width rows, gates before ups. TILES: of rows; those that share weights are neighbours.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    block = tile // TILES
    inside, ks = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DEPTH)
    ms = tile % TILES * BLOCK_ROWS + inside
    ns = block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    share = tl.cdiv(tl.cdiv(depth, BLOCK_DEPTH), SPLIT) * BLOCK_DEPTH
    first = part * share
    last = tl.minimum(first + share, depth)
    # The last block reads some rows twice rather than rows that are not there.
    held = ns if EVEN_WIDTH else tl.minimum(ns, width - 1)
    x_at = x + ms[:, None] * depth + first + ks[None, :]
    w_at = (weight + held.to(tl.int64) * depth + first)[None, :] + ks[:, None]
    present = (ms < rows)[:, None]
    # Read once, unless neighbours read it too.
    evict: tl.constexpr = "evict_first" if TILES == 1 else ""
    acc = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    other = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
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

    if SPLIT == 1:
        _finish(
            acc, other, out, squares, bias, residual, norm, scaled, totals, cos, sin, parameters, slot, block, ms, ns,
            rows, width, depth, eps, next_eps, NORMED, NORM_BLOCK, BIASED, ADDED, PAIRED, THEN, HEADS, KV_HEADS, DIM,
            ROTARY, STRIDE, PAGE, RING, FLOAT8,
        )  # fmt: skip
    else:
        size: tl.constexpr = BLOCK_ROWS * BLOCK_WIDTH
        step: tl.constexpr = size * 2 if PAIRED else size
        parts = partial + (tile * SPLIT).to(tl.int64) * step
        inner = inside[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
        tl.store(parts + part * step + inner, acc)
        if PAIRED:
            tl.store(parts + part * step + size + inner, other)
        # All of this block's parts are written before it counts itself.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
            other = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
            for turn in tl.static_range(SPLIT):
                acc += tl.load(parts + turn * step + inner, cache_modifier=".cg")
                if PAIRED:
                    other += tl.load(parts + turn * step + size + inner, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _finish(
                acc, other, out, squares, bias, residual, norm, scaled, totals, cos, sin, parameters, slot, block, ms,
                ns, rows, width, depth, eps, next_eps, NORMED, NORM_BLOCK, BIASED, ADDED, PAIRED, THEN, HEADS, KV_HEADS,
                DIM, ROTARY, STRIDE, PAGE, RING, FLOAT8,
            )  # fmt: skip


def linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    paired: bool = False,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    heads: Heads | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Normed | None]:
    """Return x [n, depth] times weight [width, depth] transposed, and the rows on their way into the norm that follows.

    n: at most step_parameters.MAX_ROWS. bias: [width]. residual: [n, width], added at the end. paired: weight
    is [2 * width, depth], and the result is silu(first half) * second half. norm: float32 [width], of the RMSNorm that
    the result goes through next. heads: the result is queries (and gates), [n, heads.shape.stride]; keys and values go
    into the session's pages. eps: of either norm that comes after the product.
    """
    source = x.scaled if isinstance(x, Normed) else x
    rows, depth = source.shape
    width = weight.shape[0] // 2 if paired else weight.shape[0]
    shape = None if heads is None else heads.shape
    out = torch.empty((rows, width if shape is None else shape.stride), dtype=source.dtype, device=source.device)
    dim, size = None if shape is None else shape.dim, source.dtype.itemsize
    config = config or choose(width, depth, paired, dim, size, devices.kernel_target(source.device))
    blocks, tiles = triton.cdiv(width, config.width), triton.cdiv(rows, _TILE_ROWS)
    partial = out
    if config.split > 1:
        each = _TILE_ROWS * config.width * (2 if paired else 1)
        partial = torch.empty(blocks * tiles * config.split * each, dtype=torch.float32, device=source.device)
    following = None
    if norm is not None:
        totals = torch.empty((blocks, rows), dtype=torch.float32, device=source.device)
        following = Normed(torch.empty_like(out), totals, eps)
    parts = len(x.squares) if isinstance(x, Normed) else 0
    _product[(blocks * tiles, config.split)](
        source, weight, out, x.squares if isinstance(x, Normed) else None, bias, residual,
        norm if heads is None else heads.norms,
        following.scaled if following else None, following.squares if following else None,
        heads.cos if heads else None, heads.sin if heads else None, heads.parameters if heads else None,
        heads.slot if heads else 0, partial, _arrived(source.device),
        rows, width, depth, x.eps if isinstance(x, Normed) else 0.0, eps,
        BLOCK_ROWS=_TILE_ROWS, BLOCK_WIDTH=config.width, BLOCK_DEPTH=config.depth, SPLIT=config.split, TILES=tiles,
        STAGES=config.stages,
        EVEN_WIDTH=width % config.width == 0, EVEN_DEPTH=depth % (config.depth * config.split) == 0,
        NORMED=parts, NORM_BLOCK=triton.next_power_of_2(max(parts, 1)), BIASED=bias is not None,
        ADDED=residual is not None, PAIRED=paired, THEN=norm is not None,
        HEADS=shape.heads if shape else 0, KV_HEADS=shape.kv_heads if shape else 0, DIM=shape.dim if shape else 0,
        ROTARY=shape.rotary if shape else 0, STRIDE=shape.stride if shape else 0, PAGE=shape.page if shape else 0,
        RING=shape.ring if shape else 0, FLOAT8=shape.float8 if shape else False,
        PRECISION=product_precision(source),
        num_warps=config.warps,
    )  # fmt: skip
    return out, following


@triton.jit
def _begin(x, norm, scaled, totals, rows, depth, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    ks = part * BLOCK + tl.arange(0, BLOCK)
    inside = ks < depth
    wide = tl.load(x + row * depth + ks, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(norm + ks, mask=inside, other=0.0)
    tl.store(scaled + row * depth + ks, (wide * factors).to(scaled.dtype.element_ty), mask=inside)
    tl.store(totals + part * rows + row, tl.sum(wide * wide, 0))


def begin(x: torch.Tensor, norm: torch.Tensor, eps: float) -> Normed:
    """Begin the RMSNorm of rows [n, depth] with float32 weights [depth]."""
    rows, depth = x.shape
    parts = triton.cdiv(depth, 1024)
    made = Normed(torch.empty_like(x), torch.empty((parts, rows), dtype=torch.float32, device=x.device), eps)
    _begin[(rows, parts)](x, norm, made.scaled, made.squares, rows, depth, BLOCK=1024, num_warps=4)
    return made


@functools.cache
def choose(
    width: int, depth: int, paired: bool, head_dim: int | None, size: int, target: KernelTarget | None
) -> Config:
    """Return the cut for a shape: the same for any number of rows, so that a row's result is too. Tried on an H200.

    size: of an element, in bytes; tiles of wider elements have as many bytes, and as many stages as there is shared
    memory for.
    """
    if head_dim is not None:
        config, enough = Config(head_dim, 128 if head_dim <= 128 else 64, stages=4), 96
    elif paired:
        config, enough = Config(32, 128, stages=4), 96
    elif width >= 16384:
        config, enough = Config(128, 128, stages=4), 1
    else:
        config, enough = Config(32, 256, stages=3), 192
    blocks, split = triton.cdiv(width, config.width), 1
    while blocks * split < enough and split < 8 and depth >= 1024 * split:
        split *= 2
    config = config._replace(depth=config.depth * 2 // size)
    stages, stage = config.stages, (config.width * (2 if paired else 1) + 16) * config.depth * size
    while target is not None and stages > 2 and (stages - 1) * stage > target.shared_bytes:
        stages -= 1
    return config._replace(split=split, stages=stages)


@functools.cache
def _arrived(device: torch.device) -> torch.Tensor:
    """Return counts of parts that have arrived, int32 [blocks]; each kernel leaves zeros behind."""
    return torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device)
