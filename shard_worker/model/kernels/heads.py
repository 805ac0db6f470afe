"""The end of a projection whose tiles are heads: per-head norm, RoPE, keys and values into the session's pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import BASE, FIRST_PAGE, ROWS, Places
from shard_worker.model.kernels.sums import row_sums


@dataclass(frozen=True, slots=True)
class HeadShape:
    """An attention layer's heads.

    dim: numbers of a head. rotary: of these, those that RoPE turns. page: positions in a page, which is [layers, 2,
    kv_heads, page, dim]. ring: slots that positions wrap around, 0 for none. window: positions that a row sees, 0 for
    all. gated: behind the values each query head has a gate. float8: keys and values are kept as float8_e4m3fn.
    """

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    page: int
    ring: int = 0
    window: int = 0
    causal: bool = True
    gated: bool = False
    float8: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def stride(self) -> int:
        """Numbers in a row of the projection's result: queries, and gates; 0 where it makes keys and values alone."""
        return self.heads * self.dim * (2 if self.gated else 1)


@dataclass(frozen=True, slots=True)
class Heads:
    """What a projection needs to finish its heads.

    norms: the per-head norms' weights, float32 [heads + kv_heads, dim]; None without such norms. cos, sin: from
    `rope_table`. slot: the layer's index in a page.
    """

    shape: HeadShape
    norms: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    places: Places
    slot: int


@triton.jit
def finish_heads(
    acc, out, norms, cos, sin, lines, sessions, indices, slot, eps, block, ms, rows,
    BLOCK_ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    STRIDE: tl.constexpr, LINE: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Finish head `block` of rows ms, [BLOCK_ROWS, DIM] in float32.

    It is rounded wherever the plain form rounds, so that a cache may be filled by either.
    """
    kind = out.dtype.element_ty
    kept: tl.constexpr = tl.float8e4nv if FLOAT8 else kind
    ds = tl.arange(0, DIM)
    if block < HEADS + KV_HEADS:
        x = acc.to(kind).to(tl.float32)
        if norms is not None:
            x *= tl.rsqrt(row_sums(x * x, BLOCK_ROWS, DIM) / DIM + eps)[:, None]
            x = (x * tl.load(norms + block * DIM + ds)[None, :]).to(kind).to(tl.float32)
        paired = tl.where(ds < ROTARY // 2, ds + ROTARY // 2, tl.where(ds < ROTARY, ds - ROTARY // 2, ds))
        y = tl.gather(x, tl.broadcast_to(paired[None, :], x.shape), 1)
        turning = (ms < rows)[:, None] & (ds < ROTARY)[None, :]
        at = ms[:, None] * ROTARY + ds[None, :]
        c = tl.load(cos + at, mask=turning, other=1.0).to(tl.float32)
        s = tl.load(sin + at, mask=turning, other=0.0).to(tl.float32)
        acc = (x * c).to(kind).to(tl.float32) + y * s
    result = acc.to(kind)
    if (block < HEADS) | (block >= HEADS + 2 * KV_HEADS):
        head = tl.where(block < HEADS, block, block - 2 * KV_HEADS)
        tl.store(out + ms[:, None] * STRIDE + head * DIM + ds[None, :], result, mask=(ms < rows)[:, None])
    else:
        if LINE == 0:
            position = tl.load(lines + BASE) + ms
            counted = ms < tl.load(lines + ROWS)
            first_page = lines + FIRST_PAGE
        else:
            session = tl.load(sessions + ms, mask=ms < rows, other=-1)
            counted = session >= 0
            numbers = lines + tl.maximum(session, 0) * LINE
            position = tl.load(numbers + BASE) + tl.load(indices + ms, mask=ms < rows, other=0)
            first_page = numbers + FIRST_PAGE
        at_slot = position % RING if RING > 0 else position
        pages = tl.load(first_page + at_slot // PAGE, mask=counted, other=0).to(tl.pointer_type(kept))
        # Values come KV_HEADS behind the keys, in the projection as in a page.
        run = slot.to(tl.int64) * 2 * KV_HEADS + block - HEADS
        vectors = pages + run * (PAGE * DIM) + at_slot % PAGE * DIM
        # As `ops.float8.narrowed`.
        stored = tl.clamp(result.to(tl.float32), -448.0, 448.0).to(kept) if FLOAT8 else result
        tl.store(tl.multiple_of(vectors[:, None] + ds[None, :], (16, 16)), stored, mask=counted[:, None])
