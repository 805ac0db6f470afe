"""The end of a projection whose tiles are heads: per-head norm, RoPE, keys and values into the session's pages.

Heads that are too wide for a tile of weights are finished apart, behind the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.model.kernels.step_parameters import BASE, FIRST_PAGE, ROWS, Places
from shard_worker.model.kernels.sums import row_sums
from shard_worker.model.layer_weights import AttentionWeights
from shard_worker.ops.float8 import FLOAT8

WIDEST_TILE = 256
"""The widest heads that a product's tile is as wide as."""


_ONE_WARP = 128
"""Numbers of the widest heads that a warp finishes alone."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """An attention layer's heads.

    dim: numbers of a head. rotary: of these, those that RoPE turns. page: positions in a page, which is [layers, 2,
    kv_heads, page, dim]. window: positions that a row sees, 0 for all. gated: behind the values each query
    head has a gate. float8: keys and values are kept as float8_e4m3fn. pages: how many addresses of other layers' pages
    come before these layers' in a session's numbers. value_norm: values have an RMSNorm, without weights.
    keys_as_values: they are what is projected for keys, before its norm and RoPE. shares: keys and values are those of
    another layer, so that the projection makes queries alone.
    """

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    page: int
    window: int = 0
    causal: bool = True
    gated: bool = False
    float8: bool = False
    pages: int = 0
    value_norm: bool = False
    keys_as_values: bool = False
    shares: bool = False

    @property
    def projected_kv_heads(self) -> int:
        """Heads of keys, and of values, that the projection makes."""
        return 0 if self.shares else self.kv_heads

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
    STRIDE: tl.constexpr, LINE: tl.constexpr, PAGE: tl.constexpr, FLOAT8: tl.constexpr,
    PAGES: tl.constexpr, VALUE_NORM: tl.constexpr, KEYS_AS_VALUES: tl.constexpr,
):  # fmt: skip
    """Finish head `block` of rows ms, [BLOCK_ROWS, DIM] in float32.

    It is rounded wherever the plain form rounds, so that a cache may be filled by either.
    """
    kind = out.dtype.element_ty
    kept: tl.constexpr = tl.float8e4nv if FLOAT8 else kind
    ds = tl.arange(0, DIM)
    values = acc
    if VALUE_NORM:
        values = acc.to(kind).to(tl.float32)
        values *= tl.rsqrt(row_sums(values * values, BLOCK_ROWS, DIM) / DIM + eps)[:, None]
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
    else:
        acc = values
    result = acc.to(kind)
    if (block < HEADS) | (block >= HEADS + 2 * KV_HEADS):
        head = tl.where(block < HEADS, block, block - 2 * KV_HEADS)
        tl.store(out + ms[:, None] * STRIDE + head * DIM + ds[None, :], result, mask=(ms < rows)[:, None])
    else:
        if LINE == 0:
            position = tl.load(lines + BASE) + ms
            counted = ms < tl.load(lines + ROWS)
            first_page = lines + FIRST_PAGE + PAGES
        else:
            session = tl.load(sessions + ms, mask=ms < rows, other=-1)
            counted = session >= 0
            numbers = lines + tl.maximum(session, 0) * LINE
            position = tl.load(numbers + BASE) + tl.load(indices + ms, mask=ms < rows, other=0)
            first_page = numbers + FIRST_PAGE + PAGES
        pages = tl.load(first_page + position // PAGE, mask=counted, other=0).to(tl.pointer_type(kept))
        # Values come KV_HEADS behind the keys, in the projection as in a page.
        run = slot.to(tl.int64) * 2 * KV_HEADS + block - HEADS
        vectors = pages + run * (PAGE * DIM) + position % PAGE * DIM
        kept_at = tl.multiple_of(vectors[:, None] + ds[None, :], (16, 16))
        # As `ops.float8.narrowed`.
        stored = tl.clamp(result.to(tl.float32), -448.0, 448.0).to(kept) if FLOAT8 else result
        tl.store(kept_at, stored, mask=counted[:, None])
        if KEYS_AS_VALUES:
            result = values.to(kind)
            stored = tl.clamp(result.to(tl.float32), -448.0, 448.0).to(kept) if FLOAT8 else result
            tl.store(kept_at + KV_HEADS * PAGE * DIM, stored, mask=counted[:, None])


@triton.jit(do_not_specialize=["rows", "slot"])
def _finish_apart(
    projected, out, norms, cos, sin, lines, sessions, indices, slot, eps, rows, stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, STRIDE: tl.constexpr,
    LINE: tl.constexpr, PAGE: tl.constexpr, FLOAT8: tl.constexpr, PAGES: tl.constexpr,
    VALUE_NORM: tl.constexpr, KEYS_AS_VALUES: tl.constexpr,
):  # fmt: skip
    ms, block = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1)
    acc = tl.load(projected + ms[:, None] * stride + block * DIM + tl.arange(0, DIM)[None, :]).to(tl.float32)
    finish_heads(
        acc, out, norms, cos, sin, lines, sessions, indices, slot, eps, block, ms, rows,
        1, HEADS, KV_HEADS, DIM, ROTARY, STRIDE, LINE, PAGE, FLOAT8, PAGES, VALUE_NORM, KEYS_AS_VALUES,
    )  # fmt: skip


def finish_apart(heads: Heads, projected: torch.Tensor, eps: float) -> torch.Tensor:
    """Finish heads of any width behind their product, projected [n, all heads * dim].

    Returns queries (and gates), [n, heads.shape.stride]; keys and values go into the sessions' pages. eps: of norms.
    """
    shape, places, (rows, width) = heads.shape, heads.places, projected.shape
    out = torch.empty((rows, shape.stride), dtype=projected.dtype, device=projected.device)
    _finish_apart[(rows, width // shape.dim)](
        projected, out, heads.norms, heads.cos, heads.sin, places.lines, places.sessions, places.indices, heads.slot,
        eps, rows, width, **constants(shape, places), num_warps=1 if shape.dim <= _ONE_WARP else 4,
    )  # fmt: skip
    return out


def session_pages(cache: AttentionCache, base: int, count: int) -> torch.Tensor:
    """Return the numbers of a session whose only cache this is, for `count` rows from position `base` on: int64 [1,
    FIRST_PAGE + pages] on its device. Errors as in `AttentionCache.reserve`."""
    cache.prepare_rows(base, count)
    numbers = torch.zeros((1, FIRST_PAGE.value + len(cache.addresses)), dtype=torch.int64)
    numbers[0, BASE.value], numbers[0, ROWS.value] = base, count
    numbers[0, FIRST_PAGE.value :] = torch.tensor(cache.addresses)
    return numbers.to(cache.device)


def finish_rows(
    weights: AttentionWeights,
    projected: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    cache: AttentionCache,
    pages: torch.Tensor,
    slot: int,
    eps: float,
) -> torch.Tensor:
    """Finish the heads of a session's rows of a prompt, as `rows.FinishedHeads` says. pages: of `session_pages`."""
    rows, _, dim = projected.shape
    shape = HeadShape(
        heads=weights.shape.heads,
        kv_heads=weights.shape.kv_heads,
        dim=dim,
        rotary=weights.shape.rope.rotary_dim,
        page=cache.page_rows,
        gated=weights.gated,
        float8=cache.dtype is FLOAT8,
        value_norm=weights.value_norm is not None,
        keys_as_values=weights.shape.keys_as_values,
        shares=weights.shares,
    )
    heads = Heads(shape, weights.qk_norm, *table, Places(pages), slot)
    return finish_apart(heads, projected.flatten(1), eps).view(rows, -1, dim)


def constants(shape: HeadShape, places: Places) -> dict[str, int | bool]:
    """Return what kernels that finish heads know of them at compile time, by the names there."""
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.projected_kv_heads,
        "DIM": shape.dim,
        "ROTARY": shape.rotary,
        "STRIDE": shape.stride,
        "LINE": places.line,
        "PAGE": shape.page,
        "FLOAT8": shape.float8,
        "PAGES": shape.pages,
        "VALUE_NORM": shape.value_norm and not shape.shares,
        "KEYS_AS_VALUES": shape.keys_as_values and not shape.shares,
    }
