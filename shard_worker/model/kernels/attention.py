"""Attention of a step's rows over their sessions' pages.

Where the rows stand and where their sessions' pages lie is data on the device: a captured launch serves all sessions.
Keys are cut into chunks at fixed positions, so that what a row sums up, and in which order, does not depend on the
rows beside it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shard_worker.device import devices
from shard_worker.device.devices import KernelTarget, product_precision
from shard_worker.model.kernels.heads import HeadShape
from shard_worker.model.kernels.matmul import SQUARES_WIDTH, store_run_sums
from shard_worker.model.kernels.step_parameters import BASE, FIRST_PAGE, FIRST_ROW, FIRST_SUM, ROWS, Places
from shard_worker.ops.rope import Rotation

_TILE_ROWS = 32
"""The most queries in a tile. More would be another matrix instruction, whose sums may differ in the last bit."""

_TILE_BYTES = 32 << 10
"""The most bytes of keys or values in a tile."""

_PROGRAMS = 264
"""So many programs keep a GPU busy."""

_SINGLE_ROWS = 128
"""Up to so many rows of several sessions have tiles for single ones, unless they are blocks: others read a session's
keys once for more of its rows."""

_SHARED_CHUNKS = 32
"""Chunks that each row of a step of several sessions has room for: 4096 positions, where all are as long."""


class Tiles(NamedTuple):
    """How attention is cut.

    queries, keys: rows of a tile of each. warps: of a program. stages: of its loop: with 3 of them a page's address is
    read two tiles ahead, and its keys and values one.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 3


def chunk_count(length: int) -> int:
    """Return how many chunks the first `length` positions are cut into."""
    if length <= 4096:
        return -(-length // 128)
    if length <= 20480:
        return 32 + -(-(length - 4096) // 512)
    if length <= 86016:
        return 64 + -(-(length - 20480) // 2048)
    return 96 + -(-(length - 86016) // 8192)


@triton.jit
def _chunks(length):
    near = tl.where(length <= 4096, tl.cdiv(length, 128), 32 + tl.cdiv(length - 4096, 512))
    far = tl.where(length <= 86016, 64 + tl.cdiv(length - 20480, 2048), 96 + tl.cdiv(length - 86016, 8192))
    return tl.where(length <= 20480, near, far)


@triton.jit
def _chunk_start(chunk):
    near = tl.where(chunk <= 32, chunk * 128, 4096 + (chunk - 32) * 512)
    far = tl.where(chunk <= 96, 20480 + (chunk - 64) * 2048, 86016 + (chunk - 96) * 8192)
    return tl.where(chunk <= 64, near, far)


@triton.jit
def _store_chunk(sums, tops, line, top, weight, total, live, DIM: tl.constexpr):
    """Store what a chunk comes to, of each query in its line."""
    ds = tl.arange(0, DIM)
    tl.store(sums + line[:, None] * DIM + ds[None, :], total, mask=live[:, None])
    tl.store(tops + line * 2, top, mask=live)
    tl.store(tops + line * 2 + 1, weight, mask=live)


@triton.jit(do_not_specialize=["slot"])
def _attend(
    projected, lines, sessions, indices, sums, tops, slot, scale, room,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, STEP_ROWS: tl.constexpr,
    LINE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    FLOAT8: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the softmax sums of one key head's queries over some of their chunks.

    sums: float32 [KV_HEADS, room, DIM]; tops: float32 [KV_HEADS, room, 2], the largest score and the sum of weights. A
    session's are [chunks, group * rows], behind those of the sessions before it; those of a session alone have room for
    all of the step's rows. LINE: of `Places`.
    """
    kv, program, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    programs = tl.num_programs(1)
    kind = projected.dtype.element_ty
    stored: tl.constexpr = tl.float8e4nv if FLOAT8 else kind
    group: tl.constexpr = HEADS // KV_HEADS
    ds, ts = tl.arange(0, DIM), tl.arange(0, TILE)
    numbers = lines
    if LINE == 0:
        ms = part * BLOCK + tl.arange(0, BLOCK)
        rows = tl.load(numbers + ROWS).to(tl.int32)
        first_row, first_line, live = 0, 0, ms // group < rows
    else:
        # One of the tiles that begin with a row; where that row is not the first of a tile, there is nothing to do.
        tile_rows: tl.constexpr = tl.maximum(BLOCK // group, 1)
        tiles: tl.constexpr = tl.cdiv(group, BLOCK)
        session = tl.load(sessions + part // tiles).to(tl.int32)
        index = tl.load(indices + part // tiles).to(tl.int32)
        numbers += tl.maximum(session, 0) * LINE
        begins = (session >= 0) & (index % tile_rows == 0)
        rows = tl.where(begins, tl.load(numbers + ROWS).to(tl.int32), 0)
        ms = index * group + part % tiles * BLOCK + tl.arange(0, BLOCK)
        first_row = tl.load(numbers + FIRST_ROW).to(tl.int32)
        first_line = tl.load(numbers + FIRST_SUM).to(tl.int32) * group
        live = begins & (ms // group < rows) & (ms < (index + tile_rows) * group)
    row, head = ms // group, kv * group + ms % group
    base = tl.load(numbers + BASE).to(tl.int32)
    q_at = projected + (first_row + row)[:, None] * STRIDE + head[:, None] * DIM + ds[None, :]
    q = tl.load(q_at, mask=(row < STEP_ROWS if LINE == 0 else live)[:, None], other=0.0)
    end = base + rows
    count = _chunks(end) if LINE == 0 else tl.where(rows > 0, _chunks(end), 0)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(base + 1 - WINDOW, 0) // TILE * TILE
    # Chunks that follow each other: one for each program, or where there are more, about as many positions.
    chunk, behind = tl.minimum(program, count), tl.minimum(program + 1, count)
    if count > programs:
        share = tl.cdiv(end - lowest, programs)
        first = lowest + program * share
        chunk = tl.where(program == 0, 0, _chunks(tl.minimum(first, end)))
        behind = _chunks(tl.minimum(first + share, end))
    last = tl.minimum(_chunk_start(behind), end)
    apart = group * (STEP_ROWS if LINE == 0 else rows)
    line = kv.to(tl.int64) * room + first_line + ms
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK, DIM), tl.float32)
    if WINDOW > 0:
        # Of what is too far away to be seen there is nothing to sum.
        seen_from = tl.minimum(tl.maximum(_chunks(lowest + 1) - 1, chunk), behind)
        for unseen in range(chunk, seen_from):
            _store_chunk(sums, tops, line + unseen * apart, top, weight, total, live, DIM)
        chunk = seen_from
    boundary = _chunk_start(chunk + 1)
    for start in tl.range(tl.maximum(_chunk_start(chunk), lowest), last, TILE, num_stages=STAGES):
        position = start + ts
        page = tl.load(numbers + FIRST_PAGE + PAGES + start // PAGE).to(tl.pointer_type(stored))
        page += (slot.to(tl.int64) * 2 * KV_HEADS + kv) * (PAGE * DIM) + start % PAGE * DIM
        key_at = tl.multiple_of(page + ts[:, None] * DIM + ds[None, :], (16, 16))
        value_at = tl.multiple_of(key_at + KV_HEADS * PAGE * DIM, (16, 16))
        there = (position < end)[:, None]
        keys = tl.load(key_at, mask=there, other=0.0)
        values = tl.load(value_at, mask=there, other=0.0)
        if FLOAT8:
            # By way of float16, which holds them all: not all GPUs with float8 go to bfloat16 at once.
            keys, values = keys.to(tl.float16).to(kind), values.to(tl.float16).to(kind)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        seen = (position < end)[None, :] & live[:, None]
        distance = base + row[:, None] - position[None, :]
        if CAUSAL:
            seen = seen & (distance >= 0)
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
            if not CAUSAL:
                seen = seen & (distance > -WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        against = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - against)
        weights = tl.exp(scores - against[:, None])
        weight = weight * kept + tl.sum(weights, 1)
        total = tl.dot(weights.to(kind), values, total * kept[:, None], input_precision=PRECISION)
        top = higher
        if (start + TILE >= boundary) | (start + TILE >= last):
            _store_chunk(sums, tops, line + chunk * apart, top, weight, total, live, DIM)
            top = tl.full((BLOCK,), float("-inf"), tl.float32)
            weight = tl.zeros((BLOCK,), tl.float32)
            total = tl.zeros((BLOCK, DIM), tl.float32)
            chunk += 1
            boundary = _chunk_start(chunk + 1)


@triton.jit
def _combine(
    projected, lines, sessions, indices, sums, tops, sinks, head_gates, out, column_sums, room,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, STEP_ROWS: tl.constexpr,
    LINE: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, TURN: tl.constexpr, GATED: tl.constexpr,
    GATES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of one row and head of out [rows, HEADS * DIM], times the gate's sigmoid.

    sinks: float32 [HEADS], a score of each head's softmax that no value belongs to; None without. head_gates: [rows,
    HEADS * GATES], whose softplus the result is multiplied by, GATES being 1 or DIM; None without. column_sums:
    float32, those of every SUMS columns of out; None where nobody wants them.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    numbers, index, first_line = lines, row, 0
    if LINE > 0:
        session = tl.load(sessions + row).to(tl.int32)
        index = tl.load(indices + row).to(tl.int32)
        numbers += tl.maximum(session, 0) * LINE
        first_line = tl.load(numbers + FIRST_SUM).to(tl.int32) * group
    rows = tl.load(numbers + ROWS).to(tl.int32)
    end = tl.load(numbers + BASE).to(tl.int32) + rows
    count = _chunks(end) if LINE == 0 else tl.where(session >= 0, _chunks(end), 0)
    # What a session alone has of the first chunks is asked for before it is known how many there are.
    apart, asked = (group * STEP_ROWS, CHUNKS) if LINE == 0 else (group * rows, count)
    line = (head // group).to(tl.int64) * room + first_line + index * group + head % group
    ds, ts, every = tl.arange(0, DIM), tl.arange(0, TURN), tl.arange(0, MOST)
    tops_at = tops + (line + every * apart) * 2
    every_top = tl.load(tops_at, mask=every < asked, other=0.0)
    every_weight = tl.load(tops_at + 1, mask=every < asked, other=0.0)
    at = line + ts * apart
    parts = tl.load(sums + at[:, None] * DIM + ds[None, :], mask=(ts < asked)[:, None], other=0.0)
    part_tops = tl.load(tops + at * 2, mask=ts < asked, other=0.0)
    top = tl.max(tl.where(every < count, every_top, float("-inf")), 0)
    if sinks is not None:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.where(every < count, every_weight * tl.exp(every_top - top), 0.0), 0)
    if sinks is not None:
        weight += tl.exp(sink - top)
    total = tl.sum(tl.where((ts < count)[:, None], parts * tl.exp(part_tops - top)[:, None], 0.0), 0)
    for first in range(TURN, count, TURN):
        at = line + (first + ts) * apart
        there = first + ts < count
        factor = tl.exp(tl.load(tops + at * 2, mask=there, other=float("-inf")) - top)
        parts = tl.load(sums + at[:, None] * DIM + ds[None, :], mask=there[:, None], other=0.0)
        total += tl.sum(parts * factor[:, None], 0)
    # Rows beyond those that count have seen nothing.
    mixed = tl.where(weight > 0, total / weight, 0.0).to(out.dtype.element_ty)
    if GATED:
        gate = tl.load(projected + row * STRIDE + (HEADS + head) * DIM + ds).to(tl.float32)
        opened = (1.0 / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
        mixed = (mixed.to(tl.float32) * opened).to(out.dtype.element_ty)
    if head_gates is not None:
        gate_at = (row * HEADS + head) * GATES + (ds if GATES > 1 else tl.zeros((DIM,), tl.int32))
        gate = tl.load(head_gates + gate_at).to(tl.float32)
        opened = tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate)))
        mixed = (mixed.to(tl.float32) * opened.to(out.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * (HEADS * DIM) + head * DIM + ds, mixed)
    if column_sums is not None:
        store_run_sums(mixed, column_sums, row * HEADS + head, DIM, SUMS)


@triton.jit
def _rope(
    lines, sessions, indices, frequencies, factor, cos, sin,
    LINE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    js = tl.arange(0, BLOCK)
    inside = js < HALF
    position = row
    if LINE > 0:
        lines += tl.maximum(tl.load(sessions + row), 0) * LINE
        position = tl.load(indices + row)
    position += tl.load(lines + BASE)
    angles = position.to(tl.float32) * tl.load(frequencies + js, mask=inside, other=0.0)
    c, s = tl.cos(angles) * factor, tl.sin(angles) * factor
    at = row * 2 * HALF + js
    kind = cos.dtype.element_ty
    tl.store(cos + at, c.to(kind), mask=inside)
    tl.store(cos + at + HALF, c.to(kind), mask=inside)
    tl.store(sin + at, (-s).to(kind), mask=inside)
    tl.store(sin + at + HALF, s.to(kind), mask=inside)


def rope_table(places: Places, rows: int, rotation: Rotation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ops.rope.rope_table` for the positions of so many rows: two [rows, rotary_dim] tensors."""
    half, device = len(rotation.frequencies), places.lines.device
    cos = torch.empty((rows, 2 * half), dtype=dtype, device=device)
    sin = torch.empty_like(cos)
    _rope[(rows,)](
        places.lines, places.sessions, places.indices, rotation.frequencies, rotation.factor, cos, sin,
        LINE=places.line, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return cos, sin


def attend(
    shape: HeadShape,
    projected: torch.Tensor,
    places: Places,
    slot: int,
    longest: int,
    sinks: torch.Tensor | None = None,
    head_gates: torch.Tensor | None = None,
    column_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what rows of queries (and gates) [n, shape.stride] see in their sessions' pages, [n, heads * dim].

    The rows' own keys and values are in the pages already. slot: the layer's index in a page. longest: positions that
    any session may have; of several sessions, `fits` says which may stand in one step. sinks: float32 [heads], of each
    head's softmax. head_gates: [n, heads or heads * dim], whose softplus the result is multiplied by.
    column_sums: memory for the result's sums, as of `Summed`; None where nobody wants them.
    """
    rows, alone = len(projected), places.line == 0
    total = shape.group * rows
    chunks = chunk_count(longest)
    device = projected.device
    room = shape.group * sums_room(rows, longest, alone=alone)
    sums = torch.empty((shape.kv_heads, room, shape.dim), dtype=torch.float32, device=device)
    tops = torch.empty((shape.kv_heads, room, 2), dtype=torch.float32, device=device)
    out = torch.empty((rows, shape.heads * shape.dim), dtype=projected.dtype, device=device)
    # Where there are more rows of several sessions, most are those of prompts.
    single = not alone and not places.blocks and rows <= _SINGLE_ROWS
    queries = shape.group if single else total
    tiles = choose(queries, shape.dim, projected.dtype.itemsize, devices.kernel_target(device))
    parts = triton.cdiv(total, tiles.queries) if alone else rows * triton.cdiv(shape.group, tiles.queries)
    # Few of a step's rows may be used, of sessions that are long.
    programs = min(chunks, max(1 if alone else 2, _PROGRAMS // (shape.kv_heads * parts)))
    placed = places.lines, places.sessions, places.indices
    common = {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.dim,
        "STRIDE": shape.stride,
        "STEP_ROWS": rows if alone else 0,
        "LINE": places.line,
    }
    _attend[(shape.kv_heads, programs, parts)](
        projected, *placed, sums, tops, slot, shape.dim**-0.5, room,
        **common, PAGE=shape.page,
        WINDOW=shape.window, CAUSAL=shape.causal, FLOAT8=shape.float8, PAGES=shape.pages, BLOCK=tiles.queries,
        TILE=tiles.keys, STAGES=tiles.stages, PRECISION=product_precision(projected),
        num_warps=tiles.warps,
    )  # fmt: skip
    _combine[(rows, shape.heads)](
        projected, *placed, sums, tops, sinks, head_gates, out, column_sums, room, **common, CHUNKS=chunks,
        MOST=triton.next_power_of_2(chunks), TURN=16, GATED=shape.gated,
        GATES=0 if head_gates is None else head_gates.shape[1] // shape.heads, SUMS=SQUARES_WIDTH, num_warps=2,
    )  # fmt: skip
    return out


def sums_room(rows: int, longest: int, *, alone: bool) -> int:
    """Return how many partial sums a query head's rows may leave in a step, those of all chunks together.

    alone: the step's rows are those of one session, which may be as long as any; those of several sessions have room
    for _SHARED_CHUNKS each, and a few for as many as 16 have, as they may all be those of long ones.
    """
    chunks = chunk_count(longest)
    return rows * chunks if alone else max(rows, 16) * min(_SHARED_CHUNKS, chunks)


@functools.cache
def choose(queries: int, dim: int, size: int, target: KernelTarget | None) -> Tiles:
    """Return how so many queries of heads of this size are cut. size: of an element, in bytes.

    The number of keys does not depend on that of queries, so that a row's result does not. Of queries, a tile that is
    at least as high as a head is wide has its rows spread over a program's warps, others their columns are, and what is
    summed over warps differs then in the last bit: heads must be on one side with all heights.
    """
    highest, tile_bytes, keys, warps, stages = _TILE_ROWS, _TILE_BYTES, 128 * 2 // size, 4, 3
    if target is not None:
        tile_bytes = target.tile_bytes
        if target.one_tile_height:
            # What is read ahead stands in registers there.
            highest, stages = 16, 2
    if size == 4 and dim > 128:
        # Registers are full of sums, which float32 takes in three passes.
        stages = 1
    keys = max(16, min(keys, tile_bytes // (dim * size)))
    if keys * dim * size > tile_bytes:
        warps = 8
    if target is not None:
        while keys > 16 and _shared_bytes(highest, keys, dim, size, target) > target.shared_bytes:
            keys //= 2
        if _shared_bytes(highest, keys, dim, size, target) > target.shared_bytes:
            highest = 16
    height = highest if dim <= highest else min(highest, max(16, triton.next_power_of_2(queries)))
    return Tiles(height, keys, warps, stages)


def _shared_bytes(queries: int, keys: int, dim: int, size: int, target: KernelTarget) -> int:
    """Return the shared memory that a program takes, at most: keys and values, queries, and the scores two times."""
    # Three passes of tf32 need what one of them has rounded off beside each number.
    parts = 2 if size == 4 and target.float32_precision == "tf32x3" else 1
    return (2 * parts * keys * dim + queries * dim + 2 * queries * keys) * size
