"""Mixtures of experts for 1 to 512 rows: the router's choice, and products with the matrices of the chosen experts.

The first kernel scores all experts for a row and chooses; where there are up to 16 rows, it also sorts the pairs of a
row and one of its experts by expert. A tile of the products that follow has rows of one expert alone, so that its
matrices are read once a step. How many tiles there are is known on the device alone: as many are launched as there may
be, and those that are not needed end at once. Nothing that is summed up depends on what rows share a tile: a product's
sum runs over the depth in order, or over the same parts of it in order, and a row's experts are added in the order in
which they were chosen. Packed matrices are read as `codes` says.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from shard_worker.device import devices
from shard_worker.device.devices import KernelTarget, product_precision
from shard_worker.model.kernels import matmul, product_cuts
from shard_worker.model.kernels.codes import (
    Form,
    exchange_columns,
    form_of,
    multiplies_together,
    packed_sums,
    wants_sums,
)
from shard_worker.model.kernels.elementwise import gated
from shard_worker.model.kernels.matmul import (
    SQUARES_WIDTH,
    Normed,
    arrivals,
    group_tensors,
    linear,
    norm_factors,
    store_sums,
    sum_of_parts,
    sums_for,
    with_factors,
)
from shard_worker.model.kernels.product_cuts import Config
from shard_worker.model.kernels.step_parameters import ROWS, Places
from shard_worker.model.layer_weights import ExpertsTogether, ExpertsWeights
from shard_worker.weights.tiled import TiledWeight
from shard_worker.weights.weight import Weight

_ROWS = 16
"""Rows of a tile, where experts have few."""

_CHOSEN_TOGETHER = 4
"""Rows that experts are chosen for at a time. One number for any number of rows: sums over experts depend on it."""

_APART = 32
"""Up to so many rows, programs score experts for no more than are chosen for at a time, so that nothing waits for other
rows' choices. The router is read from the fastest cache that programs share, and of more rows too often."""

_SCORED = 64
"""Experts that a program scores, and half as many columns of the rows as it does so over."""

_FEW_ROWS = 4
"""Rows that an expert has on average up to which tiles of packed matrices have half as many rows."""

_FEW_PROGRAMS = 6
"""Programs for each of a GPU's processors up to which parts of a sum have programs of their own."""

_CHUNK = 32
"""Pairs of a row and an expert that others are compared with at a time, where there is a single tile of rows."""

_PLACED, _COUNTS = 128, 4096
"""Pairs whose places a program looks up where there are more, and the counts of others that it adds up at a time."""

_TURN_BYTES = 128
"""Bytes of a row's codes that a program of a packed product reads in a turn, where the widest tiles divide it."""

_MIXED_WIDTH = 64
"""The most columns of a row that a program adds up, where that is not done with a product."""

_WIDTH_MULTIPLE = 32
"""A tile of the last product has so many columns or a multiple, as squares are summed up by so many."""


@triton.jit
def _place(
    chosen, order, tiles, ps, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    HEIGHT: tl.constexpr,
):  # fmt: skip
    """Store where pairs ps [BLOCK], which are all, stand sorted by expert, and the tiles of each expert that has some,
    of HEIGHT rows or the rest. Those of unused rows, whose expert is EXPERTS, come last and have none.

    chosen: the expert of each pair. order: the pair at each place. tiles: [BLOCK, 4], as of `Routed`: each begins at
    the place of its number.
    """
    own = tl.load(chosen + ps, mask=ps < pairs, other=1 << 20, cache_modifier=".cg")
    first, rank, count = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        qs = start + tl.arange(0, CHUNK)
        others = tl.load(chosen + qs, mask=qs < pairs, other=1 << 21, cache_modifier=".cg")
        same = own[:, None] == others[None, :]
        first += tl.sum((others[None, :] < own[:, None]).to(tl.int32), 1)
        rank += tl.sum((same & (qs[None, :] < ps[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    inside = ps < pairs
    tl.store(order + first + rank, ps, mask=inside)
    at = tiles + (first + rank) * 4
    begins = rank % HEIGHT == 0
    tl.store(at, tl.where(begins & (own < EXPERTS), own, -1), mask=inside)
    tl.store(at + 1, first + rank, mask=inside & begins)
    tl.store(at + 2, tl.minimum(count - rank, HEIGHT), mask=inside & begins)


@triton.jit(do_not_specialize=["rows"])
def _route(
    x, router, bias, choice_bias, scales, squares, factors, sessions, numbers, partial, arrived, chosen, shares, taken,
    order, tiles, rows, hidden, eps,
    EXPERTS: tl.constexpr, SCORES: tl.constexpr, ALL: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    SCORED: tl.constexpr, PART: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, HEIGHT: tl.constexpr,
    TOGETHER: tl.constexpr, NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr, SIGMOID: tl.constexpr, CAP: tl.constexpr,
    SCALE: tl.constexpr, NORMALISED: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr,
    PLACED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Score some experts for a tile of rows, over a part of their columns; the last of a tile's programs then chooses.

    TILE: rows of a tile, of the HEIGHT that are multiplied at once.
    bias: float32 [EXPERTS], of the scores; None for none. choice_bias: the same, of what experts are chosen by alone.
    scales: float32 [EXPERTS], what each one's shares are multiplied by; None for nothing.
    sessions, numbers: as the sessions and lines of `Places`, which say what rows are unused; None where none are, and
    sessions for one session too.
    SCORES: rows of the router, behind whose EXPERTS the shared expert's gate is where it is GATED. ALL, PADDED: EXPERTS
    and CHOSEN, rounded up. TOGETHER: rows that are chosen for at a time. SIGMOID: shares are each score's own, and not
    of a softmax. CAP: what scores are capped at, 0 for nothing. SCALE: what shares are multiplied by. PAIRS: as many as
    all rows may have, where these are several and so few that their pairs are then sorted by expert here; else 0.
    TILES: of rows, then. PLACED: rows of the tiles into which pairs are sorted.
    """
    block, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    inside = tl.arange(0, HEIGHT)
    ms = tile * TILE + inside
    present = ((inside < TILE) & (ms < rows))[:, None]
    es = block * SCORED + tl.arange(0, SCORED)
    product = tl.zeros((HEIGHT, SCORED), tl.float32)
    for turn in tl.static_range(PART // DEPTH):
        ks = part * PART + turn * DEPTH + tl.arange(0, DEPTH)
        x_at = x + ms[:, None] * hidden + ks[None, :]
        x_tile = tl.load(x_at, mask=present & (ks < hidden)[None, :], other=0.0).to(tl.float32)
        w_at = router + es[None, :] * hidden + ks[:, None]
        w_tile = tl.load(w_at, mask=(es < SCORES)[None, :] & (ks < hidden)[:, None], other=0.0)
        product = tl.dot(x_tile, w_tile, product, input_precision=PRECISION)
    line: tl.constexpr = (SCORES + SCORED - 1) // SCORED * SCORED
    lines = partial + ((tile * PARTS + part) * TILE + inside)[:, None] * line
    tl.store(lines + es[None, :], product, mask=present)
    # All of this program's scores are written before it counts itself.
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS * tl.num_programs(0) - 1:
        tl.store(arrived + tile, 0)
        # A few rows at a time: their scores of all parts are on their way at once.
        for start in range(0, tl.minimum(rows - tile * TILE, TILE), TOGETHER):
            some = start + tl.arange(0, TOGETHER)
            _choose(
                bias, choice_bias, scales, squares, factors, sessions, numbers, partial + tile * PARTS * TILE * line,
                chosen, shares, taken, tile * TILE, some, rows, hidden, eps, EXPERTS, line, ALL, CHOSEN, PADDED,
                PARTS, TILE, TOGETHER, NORMED, NORM_BLOCK, SIGMOID, CAP, SCALE, NORMALISED, GATED,
            )  # fmt: skip
        if PAIRS > 0:
            # What other threads chose is read.
            tl.debug_barrier()
            is_last = True
            if TILES > 1:
                is_last = tl.atomic_add(arrived + TILES, 1, sem="acq_rel") == TILES - 1
            if is_last:
                if TILES > 1:
                    tl.store(arrived + TILES, 0)
                _place(chosen, order, tiles, tl.arange(0, PAIRS), rows * CHOSEN, EXPERTS, PAIRS, CHUNK, PLACED)


@triton.jit
def _choose(
    bias, choice_bias, scales, squares, factors, sessions, numbers, partial, chosen, shares, taken, first, some, rows,
    hidden, eps,
    EXPERTS: tl.constexpr, LINE: tl.constexpr, ALL: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, HEIGHT: tl.constexpr, TOGETHER: tl.constexpr, NORMED: tl.constexpr, NORM_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, NORMALISED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sum up the scores of some rows [TOGETHER] of a tile, and choose their experts. first: the tile's first row.
    HEIGHT: its rows. LINE: how far rows are apart in `partial`.
    factors: float32 [rows], of the norm that is due on the rows; they are computed here where NORMED is not 0. Unused
    rows choose the expert EXPERTS, which there is not: what they would have, only they would read.
    """
    ms = first + some
    present = (ms < rows)[:, None]
    cs, js = tl.arange(0, ALL)[None, :], tl.arange(0, PADDED)[None, :]
    if NORMED > 0:
        factor = norm_factors(squares, ms, rows, hidden, eps, NORMED, NORM_BLOCK, TOGETHER)
        tl.store(factors + ms, factor, mask=ms < rows)
    else:
        factor = tl.load(factors + ms, mask=ms < rows, other=0.0)
    total = tl.zeros((TOGETHER, ALL), tl.float32)
    gate = tl.zeros((TOGETHER,), tl.float32)
    for turn in tl.static_range(PARTS):
        lines = partial + (turn * HEIGHT + some) * LINE
        total += tl.load(lines[:, None] + cs, mask=present & (cs < EXPERTS), other=0.0, cache_modifier=".cg")
        if GATED:
            gate += tl.load(lines + EXPERTS, mask=ms < rows, other=0.0, cache_modifier=".cg")
    total *= factor[:, None]
    opened = tl.full((TOGETHER,), 1.0, tl.float32)
    if GATED:
        opened = 1.0 / (1.0 + tl.exp(-gate * factor))
    tl.store(taken + ms, opened, mask=ms < rows)
    if bias is not None:
        total += tl.load(bias + cs, mask=cs < EXPERTS, other=0.0)
    if CAP > 0:
        total = CAP * (1.0 - 2.0 / (1.0 + tl.exp(total * (2.0 / CAP))))
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-total))
    else:
        total = tl.where(cs < EXPERTS, total, -float("inf"))
        exponentials = tl.exp(total - tl.max(total, 1)[:, None])
        share = exponentials / tl.sum(exponentials, 1)[:, None]
    left = share
    if choice_bias is not None:
        left += tl.load(choice_bias + cs, mask=cs < EXPERTS, other=0.0)
    left = tl.where(cs < EXPERTS, left, -float("inf"))
    found = tl.zeros((TOGETHER, PADDED), tl.int32)
    kept = tl.zeros((TOGETHER, PADDED), tl.float32)
    whole = tl.zeros((TOGETHER,), tl.float32)
    for turn in tl.static_range(CHOSEN):
        most = tl.max(left, 1)
        # Of equal ones the first; what is not a number is equal to none.
        index = tl.min(tl.where(left == most[:, None], cs, EXPERTS - 1), 1)
        own = most
        if choice_bias is not None:
            own = tl.sum(tl.where(cs == index[:, None], share, 0.0), 1)
        found = tl.where(js == turn, index[:, None], found)
        kept = tl.where(js == turn, own[:, None], kept)
        whole += own
        left = tl.where(cs == index[:, None], -float("inf"), left)
    if NORMALISED:
        kept = kept / whole[:, None]
    if SCALE != 1.0:
        kept *= SCALE
    if scales is not None:
        kept *= tl.load(scales + found)
    if sessions is not None:
        used = tl.load(sessions + ms, mask=ms < rows, other=-1) >= 0
        found = tl.where(used[:, None], found, EXPERTS)
    elif numbers is not None:
        found = tl.where((ms < tl.load(numbers + ROWS))[:, None], found, EXPERTS)
    at, is_pair = ms[:, None] * CHOSEN + js, present & (js < CHOSEN)
    tl.store(chosen + at, found, mask=is_pair)
    tl.store(shares + at, kept, mask=is_pair)


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Count how many of BLOCK pairs go to each expert. counts: int32 [blocks, BINS]."""
    block = tl.program_id(0)
    ps = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(chosen + ps, mask=ps < pairs, other=EXPERTS)
    has_expert = own < EXPERTS
    found = tl.histogram(tl.where(has_expert, own, 0), BINS, mask=has_expert)
    tl.store(counts + block * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    chosen, counts, order, tiles, pairs,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCKS: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Store where BLOCK pairs stand among all, sorted by expert, and the tiles that begin with one of them.

    counts: as `_count` leaves them. BLOCKS: whose counts are added up at a time. order, tiles: as of `Routed`; there
    are as many tiles as there may be, which have the expert -1 before.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    es, bs, ps = tl.arange(0, BINS), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, blocks, BLOCKS):
        others = (start + bs)[:, None]
        some = tl.load(counts + others * BINS + es[None, :], mask=others < blocks, other=0)
        total += tl.sum(some, 0)
        before += tl.sum(tl.where(others < block, some, 0), 0)
    places = block * BLOCK + ps
    own = tl.load(chosen + places, mask=places < pairs, other=EXPERTS)
    inside = own < EXPERTS
    own = tl.where(inside, own, 0)
    same = own[:, None] == tl.load(chosen + places, mask=inside, other=BINS)[None, :]
    rank = tl.gather(before, own, 0) + tl.sum((same & (ps[None, :] < ps[:, None])).to(tl.int32), 1)
    first, count = tl.gather(tl.cumsum(total, 0) - total, own, 0), tl.gather(total, own, 0)
    tl.store(order + first + rank, places, mask=inside)
    begins = inside & (rank % HEIGHT == 0)
    # Of an expert's run of tiles the first one is behind those of the experts before it, however they are filled.
    at = tiles + (first // HEIGHT + own + rank // HEIGHT) * 4
    tl.store(at, own, mask=begins)
    tl.store(at + 1, first + rank, mask=begins)
    tl.store(at + 2, tl.minimum(count - rank, HEIGHT), mask=begins)


@triton.jit
def _mix(
    parts, shares, taken, shared, residual, out, norm, scaled, totals, next_sums, row, block, rows, width,
    CHOSEN: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, SQUARES: tl.constexpr, SHARED: tl.constexpr,
    THEN: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Add up what a row's experts made of it, WIDTH columns, with the shared expert's part, the residual and the next
    norm's beginning. parts: float32 [PARTS, rows * CHOSEN, width], what all parts of the depth make."""
    ms = row + tl.arange(0, 1)
    ns = block * WIDTH + tl.arange(0, WIDTH)
    kept = (ms[:, None] < rows) & (ns[None, :] < width)
    at = ms[:, None] * width + ns[None, :]
    kind = out.dtype.element_ty
    acc = tl.zeros((1, WIDTH), tl.float32)
    for turn in tl.static_range(CHOSEN):
        share = tl.load(shares + row * CHOSEN + turn)
        line = parts + (row * CHOSEN + turn).to(tl.int64) * width + ns[None, :]
        whole = tl.load(line, mask=kept, other=0.0, cache_modifier=".cg")
        for part in tl.static_range(1, PARTS):
            further = line + part * (rows * CHOSEN).to(tl.int64) * width
            whole += tl.load(further, mask=kept, other=0.0, cache_modifier=".cg")
        acc = tl.fma(whole, share, acc)
    if SHARED:
        acc = tl.fma(tl.load(shared + at, mask=kept, other=0.0).to(tl.float32), tl.load(taken + row), acc)
    # Rounded before it is added, as a product of its own would be.
    if residual is not None:
        acc = acc.to(kind).to(tl.float32) + tl.load(residual + at, mask=kept, other=0.0).to(tl.float32)
    result = acc.to(kind)
    tl.store(out + at, result, mask=kept)
    if THEN:
        acc = tl.where(kept, result.to(tl.float32), 0.0)
        result = (acc * tl.load(norm + ns, mask=ns < width, other=0.0)[None, :]).to(kind)
        tl.store(scaled + at, result, mask=kept)
        store_sums(acc * acc, totals, block, ms, rows, width, 1, WIDTH, SQUARES)
    if SUMMED:
        wide = tl.where(kept, result.to(tl.float32), 0.0)
        store_sums(wide, next_sums, block, ms, rows, width, 1, WIDTH, SQUARES)


@triton.jit(do_not_specialize=["rows"])
def _mix_rows(
    parts, shares, taken, shared, residual, out, norm, scaled, totals, next_sums, rows, width,
    CHOSEN: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, SQUARES: tl.constexpr, SHARED: tl.constexpr,
    THEN: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    _mix(
        parts, shares, taken, shared, residual, out, norm, scaled, totals, next_sums, tl.program_id(0),
        tl.program_id(1), rows, width, CHOSEN, PARTS, WIDTH, SQUARES, SHARED, THEN, SUMMED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, scales, scale_factors, offsets, offset_factors, sums, bias, made, made_sums, factors, experts, order,
    tiles, partial, arrived, shares, taken, shared, residual, out, norm, scaled, totals, next_sums, rows, stride, width,
    depth,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr, SERIAL: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, EVEN_DEPTH: tl.constexpr, ALONE: tl.constexpr, SINGLE: tl.constexpr,
    FIRST: tl.constexpr, MIXED: tl.constexpr, SQUARES: tl.constexpr, SHARED: tl.constexpr, THEN: tl.constexpr,
    SUMMED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GELU: tl.constexpr, PRECISION: tl.constexpr,
    TOGETHER: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's rows by some rows of its matrix, and add their biases, where there are any.

    FIRST: x has the step's rows, which a norm's factors are due on, weight has 2 * width rows for each expert, gates
    before ups, and made [pairs sorted by expert, width] becomes SiLU(gates) * ups, and made_sums the sums of every
    SQUARES of its columns. Else x has rows sorted by expert, and made, float32 [parts, pairs, width], has them as the
    router chose them. LIMIT, ALPHA: of gates that are clamped, as of `ops.activation.clamped_swiglu`; LIMIT is 0 for
    others. GELU: in tanh's form, in place of SiLU. MIXED, ALONE: as of `Routed`. SINGLE: there is but one row, each of
    whose pairs is a tile. stride: rows of weight from one expert to the next. UNIT, SPLIT, SERIAL, FORM: as of the
    products in `matmul`; a matrix that is not packed is not split.
    """
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    inside = tl.arange(0, HEIGHT)
    if SINGLE:
        expert, first, count = tl.load(experts + tile), tile, 1
        is_row = inside < 1
        places = tile + inside
        pairs = places
        ms = inside if FIRST else places
    else:
        expert = tl.load(tiles + tile * 4)
        if expert < 0:
            return
        first, count = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
        is_row = inside < count
        places = first + inside
        pairs = tl.load(order + places, mask=is_row, other=0)
        ms = pairs // CHOSEN if FIRST else places
    ns, ks = block * WIDTH + tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    # The last block reads some rows twice rather than rows that are not there.
    held = ns if EVEN_WIDTH else tl.minimum(ns, width - 1)
    height = width * 2 if FIRST else width
    apart: tl.constexpr = SPLIT > 1 and not SERIAL
    begun = tl.zeros((WIDTH,), tl.float32)
    if not FIRST and bias is not None:
        begun = tl.load(bias + expert * width + held).to(tl.float32)
        if apart:
            begun = tl.where(part == 0, begun, 0.0)
    acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    other = tl.zeros((HEIGHT, WIDTH), tl.float32)
    if FORM is not None:
        most = rows if FIRST else rows * CHOSEN
        present = tl.where(is_row, ms, most)
        share = tl.cdiv(tl.cdiv(depth, UNIT), SPLIT) * UNIT
        acc += begun[None, :]
        if SERIAL:
            for turn in range(SPLIT):
                own, own_other = packed_sums(
                    x, weight, scales, scale_factors, offsets, offset_factors, sums, present, block, turn * share,
                    tl.minimum(turn * share + share, depth), most, expert * stride, EXPERTS * stride, width, depth,
                    HEIGHT, WIDTH, DEPTH, STAGES, WARPS, TOGETHER, FIRST, PRECISION, FORM,
                )  # fmt: skip
                acc += own
                other += own_other
        else:
            own, other = packed_sums(
                x, weight, scales, scale_factors, offsets, offset_factors, sums, present, block, part * share,
                tl.minimum(part * share + share, depth), most, expert * stride, EXPERTS * stride, width, depth,
                HEIGHT, WIDTH, DEPTH, STAGES, WARPS, TOGETHER, FIRST, PRECISION, FORM,
            )  # fmt: skip
            acc += own
    else:
        x_at = x + ms[:, None] * depth + ks[None, :]
        w_at = (weight + (expert.to(tl.int64) * stride + held) * depth)[None, :] + ks[:, None]
        # Read once, unless another tile reads it too.
        evict: tl.constexpr = "evict_first" if ALONE else ""
        for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
            if EVEN_DEPTH:
                x_tile = tl.load(x_at, mask=is_row[:, None], other=0.0)
                w_tile = tl.load(w_at, eviction_policy=evict)
            else:
                x_tile = tl.load(x_at, mask=is_row[:, None] & (k + ks < depth)[None, :], other=0.0)
                w_tile = tl.load(w_at, mask=(k + ks < depth)[:, None], other=0.0)
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
            if FIRST:
                u_at = w_at + width.to(tl.int64) * depth
                if EVEN_DEPTH:
                    u_tile = tl.load(u_at, eviction_policy=evict)
                else:
                    u_tile = tl.load(u_at, mask=(k + ks < depth)[:, None], other=0.0)
                other = tl.dot(x_tile, u_tile, other, input_precision=PRECISION)
            x_at += DEPTH
            w_at += DEPTH
        acc += begun[None, :]
    kept = is_row[:, None] & (ns < width)[None, :]
    if FIRST:
        is_whole = True
        if apart:
            is_whole, acc, other = sum_of_parts(
                acc, other, partial, arrived, tile * tl.num_programs(1) + block, part, HEIGHT, WIDTH, SPLIT, True
            )
        if is_whole:
            factor = tl.load(factors + ms, mask=is_row, other=0.0)
            acc *= factor[:, None]
            other *= factor[:, None]
            if bias is not None:
                bias_at = bias + expert * height + held
                acc += tl.load(bias_at).to(tl.float32)[None, :]
                other += tl.load(bias_at + width).to(tl.float32)[None, :]
            if LIMIT > 0:
                acc = tl.minimum(acc, LIMIT)
                other = tl.minimum(tl.maximum(other, -LIMIT), LIMIT) + 1.0
            result = (gated(acc, other, True) if GELU else acc / (1.0 + tl.exp(-acc * ALPHA)) * other).to(
                made.dtype.element_ty
            )
            tl.store(made + places[:, None] * width + ns[None, :], result, mask=kept)
            if made_sums is not None:
                wide = tl.where(kept, result.to(tl.float32), 0.0)
                store_sums(wide, made_sums, block, places, first + count, width, HEIGHT, WIDTH, SQUARES)
    else:
        lines = part * (rows * CHOSEN).to(tl.int64) + pairs
        tl.store(made + lines[:, None] * width + ns[None, :], acc, mask=kept)
        if MIXED:
            # All of this program's part is written before it counts itself.
            tl.debug_barrier()
            parts: tl.constexpr = SPLIT if apart else 1
            for turn in range(count):
                row = tile // CHOSEN if SINGLE else tl.load(order + first + turn) // CHOSEN
                counter = arrived + row * tl.num_programs(1) + block
                if tl.atomic_add(counter, 1, sem="acq_rel") == CHOSEN * parts - 1:
                    tl.store(counter, 0)
                    _mix(
                        made, shares, taken, shared, residual, out, norm, scaled, totals, next_sums, row, block, rows,
                        width, CHOSEN, parts, WIDTH, SQUARES, SHARED, THEN, SUMMED,
                    )  # fmt: skip


def run(
    weights: ExpertsWeights,
    normed: Normed,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    then: Weight | None,
    *,
    routed: torch.Tensor | None = None,
    places: Places | None = None,
) -> tuple[torch.Tensor, Normed | None]:
    """Return the residual [n, hidden] plus what a mixture makes of the rows, and these on their way into what follows.

    normed: the rows, as they come to the mixture. residual: None for nothing. norm, eps: of the norm that follows.
    then: what the rows are multiplied by behind it, where that is known: they are given with the sums that it wants.
    routed: what the router takes of the rows, which the same factors are due on; None for what comes to the mixture.
    places: where the rows stand, of which some may be unused: nothing is made of those; None where all are used.
    """
    together = weights.together
    assert together is not None
    x = normed.scaled
    (rows, hidden), device = x.shape, x.device
    experts, chosen_count = weights.router.rows, weights.chosen
    size = together.down.columns
    target, item = devices.kernel_target(device), x.dtype.itemsize
    forms = forms_of(together)
    height = tile_height(rows, chosen_count, experts, forms, item, target)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    shared = None
    if weights.shared is not None:
        inner, summed = linear(
            normed, weights.shared.gate_up, paired=True, gelu=together.gelu, then=weights.shared.down
        )
        shared, _ = linear(inner if summed is None else summed, weights.shared.down)
    normed, placed = route(weights, normed, x if routed is None else routed, together.scores, height, places)

    cuts = [
        choose(width, depth, first, chosen_count, item, height, target)
        if form is None
        else choose_packed(form, width, depth, first, chosen_count, item, rows, height, target)
        for form, width, depth, first in zip(forms, (size, hidden), (hidden, size), (True, False), strict=True)
    ]
    out, sums_shape = torch.empty_like(x), (rows, triton.cdiv(hidden, SQUARES_WIDTH))
    next_sums = sums_for(then, x.shape)
    following = None
    if norm is not None:
        following = Normed(torch.empty_like(out), empty(*sums_shape), eps, sums=next_sums)
    assert normed.factors is not None
    multiply(weights, x, normed.sums, normed.factors, placed, cuts, Mixed(out, shared, residual, norm, following))
    return out, None if following is None else with_factors(following)


def route(
    weights: ExpertsWeights,
    normed: Normed,
    seen: torch.Tensor,
    scores: torch.Tensor,
    height: int,
    places: Places | None = None,
) -> tuple[Normed, Routed]:
    """Choose the experts of rows, and sort the pairs of a row and an expert into tiles of up to so many. Return the
    rows with their norm's factors too.

    normed: the rows [n, hidden]. seen: what the router takes of them, which the same factors are due on. scores: as of
    `ExpertsTogether`. places: as of `run`.
    """
    experts, chosen_count = weights.router.rows, weights.chosen
    (rows, hidden), device = seen.shape, seen.device
    pairs, one_tile = rows * chosen_count, rows <= _ROWS

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chosen, order = empty(pairs, dtype=torch.int32), empty(pairs, dtype=torch.int32)
    shares, taken = empty(pairs), empty(rows)
    slots = pairs if one_tile else pairs // height + experts
    tiles = (
        empty(slots, 4, dtype=torch.int32) if one_tile else torch.full((slots, 4), -1, dtype=torch.int32, device=device)
    )
    score_blocks = triton.cdiv(len(scores), _SCORED)
    part = min(2 * _SCORED, max(16, triton.next_power_of_2(hidden)))
    parts = triton.cdiv(hidden, part)
    # RDNA multiplies float32 number by number, each thread with a tile of its own in registers.
    scored_at_once = 16 if product_cuts.few_registers(devices.kernel_target(device)) else part
    tile = _CHOSEN_TOGETHER if rows <= _APART else _ROWS
    row_tiles = triton.cdiv(rows, tile)
    factors = empty(rows) if normed.factors is None else normed.factors
    sigmoid = weights.sigmoid
    sessions, lines = (None, None) if places is None or rows == 1 else (places.sessions, places.lines)
    _route[(score_blocks, parts, row_tiles)](
        seen, scores, weights.router_bias, weights.choice_bias, weights.scales, normed.squares, factors,
        sessions, lines,
        empty(row_tiles * parts * tile * score_blocks * _SCORED), arrivals(device), chosen, shares, taken, order, tiles,
        rows, hidden, normed.eps,
        EXPERTS=experts, SCORES=len(scores), ALL=triton.next_power_of_2(experts), CHOSEN=chosen_count,
        PADDED=triton.next_power_of_2(chosen_count), SCORED=_SCORED, PART=part, DEPTH=min(part, scored_at_once),
        PARTS=parts, HEIGHT=_ROWS, TOGETHER=_CHOSEN_TOGETHER, SIGMOID=sigmoid is not None,
        CAP=0.0 if sigmoid is None else sigmoid.cap or 0.0, SCALE=1.0 if sigmoid is None else sigmoid.scale,
        NORMALISED=weights.normalised, GATED=weights.shared_gate is not None,
        PAIRS=triton.next_power_of_2(rows * chosen_count) if 1 < rows <= _ROWS else 0,
        CHUNK=_CHUNK, PLACED=height, TILE=tile, TILES=row_tiles if 1 < rows <= _ROWS else 1,
        NORMED=normed.squares.shape[1] if normed.factors is None else 0,
        NORM_BLOCK=triton.next_power_of_2(normed.squares.shape[1]), PRECISION=product_precision(scores),
        num_warps=4,
    )  # fmt: skip
    if not one_tile:
        blocks, bins = triton.cdiv(pairs, _PLACED), triton.next_power_of_2(experts)
        counts = empty(blocks, bins, dtype=torch.int32)
        _count[(blocks,)](chosen, counts, pairs, EXPERTS=experts, BLOCK=_PLACED, BINS=bins, num_warps=4)
        _sort[(blocks,)](
            chosen, counts, order, tiles, pairs, EXPERTS=experts, BLOCK=_PLACED, BINS=bins,
            BLOCKS=max(1, _COUNTS // bins), HEIGHT=height, num_warps=4,
        )  # fmt: skip
    routed = Routed(chosen, shares, taken, order, tiles, alone=rows <= height, mixed=one_tile)
    return replace(normed, factors=factors), routed


@dataclass(frozen=True, slots=True)
class Routed:
    """The pairs of a row and one of its experts, in tiles of one expert's rows each.

    experts: int32 [rows * chosen], of each pair; one that there is not for pairs of unused rows, which no tile has.
    shares: float32 [rows * chosen], as the router chose. taken: float32 [rows], how much of the shared expert each row
    takes. order: int32 [rows * chosen], the pair at each place, sorted by expert. tiles: int32 [n, 4], each one's
    expert, -1 for none, its first place and its rows; of a row alone nothing stands in either, as each pair is then a
    tile. alone: no expert has more than one tile. mixed: the program with which a row's last expert is done adds all of
    them up, which needs that.
    """

    experts: torch.Tensor
    shares: torch.Tensor
    taken: torch.Tensor | None
    order: torch.Tensor
    tiles: torch.Tensor
    alone: bool
    mixed: bool


@dataclass(frozen=True, slots=True)
class Mixed:
    """What becomes of what experts make of rows: the sum of each row's goes to out [n, hidden].

    shared: what the shared expert makes of the rows, and residual: both [n, hidden], are added, None for nothing. norm,
    following: of the norm behind, and where the rows go on their way through it.
    """

    out: torch.Tensor
    shared: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    following: Normed | None = None


def multiply(
    weights: ExpertsWeights,
    x: torch.Tensor,
    sums: torch.Tensor | None,
    factors: torch.Tensor,
    routed: Routed,
    cuts: Sequence[Config],
    mixed: Mixed,
) -> None:
    """Take rows x [n, hidden] through the experts that they are routed to, and add up what these make of each.

    sums: as of `Normed`, where they are there. factors: float32 [n], of the norm that is due on the rows. cuts: of both
    products, whose height is that of the tiles or more.
    """
    together, experts = weights.together, weights.router.rows
    assert together is not None
    (rows, hidden), device, size = x.shape, x.device, together.down.columns
    pairs, slots, forms = len(routed.order), len(routed.tiles), forms_of(together)
    chosen = pairs // rows

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # The second product's sums are those of the first one's results, where its tiles have whole runs of columns.
    wants_middle = forms[1] is not None and bool(forms[1].offset) and forms[1].sums == SQUARES_WIDTH
    middle_sums = empty(pairs, size // SQUARES_WIDTH) if wants_middle and cuts[0].width % SQUARES_WIDTH == 0 else None
    parts = 1 if cuts[1].serial else cuts[1].split
    middle, made = empty(pairs, size, dtype=x.dtype), empty(parts, pairs, hidden)
    following = mixed.following
    next_sums = None if following is None else following.sums
    mixing = (
        routed.shares, routed.taken, mixed.shared, mixed.residual, mixed.out, mixed.norm,
        following.scaled if following else None, following.squares if following else None, next_sums,
    )  # fmt: skip
    target = devices.kernel_target(device)
    behind = {"SHARED": mixed.shared is not None, "THEN": following is not None, "SUMMED": next_sums is not None}
    limit, alpha = (0.0, 1.0) if together.clamped is None else (together.clamped.limit, together.clamped.alpha)
    for first, form, cut in zip((True, False), forms, cuts, strict=True):
        width, depth = (size, hidden) if first else (hidden, size)
        weight = together.gate_up if first else together.down
        bias = together.gate_up_bias if first else together.down_bias
        by_four = multiplies_together(target, cut.width, cut.height, cut.warps)
        packed, source, own_sums = _packed(weight), x if first else middle, sums if first else middle_sums
        read, groups = weight.tensor if packed is None else packed.codes.view(torch.int32), matmul.NO_GROUPS
        if packed is not None and form is not None:
            groups = group_tensors(packed, form, source, own_sums)
            source = exchange_columns(source, form, together=by_four)
        blocks, programs = triton.cdiv(width, cut.width), 1 if cut.serial else cut.split
        partial = empty(slots * blocks * programs * cut.height * cut.width * 2) if first and programs > 1 else made
        _product[(slots, blocks, programs)](
            source, read, *groups, bias, middle if first else made, middle_sums if first else None, factors,
            routed.experts, routed.order, routed.tiles, partial, arrivals(device), *mixing, rows,
            weight.rows // experts, width, depth,
            EXPERTS=experts, CHOSEN=chosen, HEIGHT=cut.height, WIDTH=cut.width, DEPTH=cut.depth,
            STAGES=cut.stages, WARPS=cut.warps, UNIT=product_cuts.UNIT, SPLIT=cut.split, SERIAL=cut.serial,
            EVEN_WIDTH=width % cut.width == 0, EVEN_DEPTH=depth % cut.depth == 0, ALONE=routed.alone,
            SINGLE=rows == 1, FIRST=first, MIXED=routed.mixed and not first, SQUARES=SQUARES_WIDTH, LIMIT=limit,
            ALPHA=alpha, GELU=together.gelu, PRECISION=product_precision(x),
            TOGETHER=by_four, FORM=form, num_warps=cut.warps,
            **behind,
        )  # fmt: skip
    if not routed.mixed:
        wide = min(cuts[1].width, _MIXED_WIDTH)
        _mix_rows[(rows, triton.cdiv(hidden, wide))](
            made, *mixing, rows, hidden, CHOSEN=chosen, PARTS=parts, WIDTH=wide, SQUARES=SQUARES_WIDTH, num_warps=1,
            **behind,
        )  # fmt: skip


def forms_of(together: ExpertsTogether) -> list[Form | None]:
    """Return the forms of gates and ups and of downs, None for dense ones."""
    return [None if packed is None else form_of(packed) for packed in map(_packed, (together.gate_up, together.down))]


def reads(weights: ExpertsWeights) -> Weight | None:
    """Return what all rows that come to a mixture are multiplied by, as of `then` in `matmul.linear`: of the shared
    expert's matrix and the routed ones' that which wants sums, if any."""
    own = [] if weights.together is None else [weights.together.gate_up]
    own += [] if weights.shared is None else [weights.shared.gate_up]
    return next(filter(wants_sums, own), None)


def _packed(weight: Weight) -> TiledWeight | None:
    return weight if isinstance(weight, TiledWeight) else None


def tile_height(
    rows: int, chosen: int, experts: int, forms: Sequence[Form | None], size: int, target: KernelTarget | None
) -> int:
    """Return the rows of a tile, by how many an expert has if all have as many.

    forms: as of `forms_of`. size: of an element, in bytes. More rows than 16 are another matrix instruction on some
    GPUs. Fewer are enough for most experts where they have few: where one has more, its packed matrices are read twice.
    """
    if any(form is not None and form.lane_columns for form in forms) and rows * chosen <= _FEW_ROWS * experts:
        return _ROWS // 2
    if target is None or target.one_tile_height or size != 2:
        return _ROWS
    return 2 * _ROWS if rows * chosen > 12 * experts and rows > _ROWS else _ROWS


@functools.cache
def choose(
    width: int, depth: int, first: bool, chosen: int, size: int, height: int, target: KernelTarget | None
) -> Config:
    """Return how a product with dense matrices is cut, so that a single row's experts keep all of a GPU busy. Not tried
    on any.

    Of the first product there are two tiles of weights, gates and ups. size: of an element, in bytes.
    """
    processors = 132 if target is None else target.processors
    wide = 32
    if first and triton.cdiv(width, wide) * chosen < processors:
        wide = 16
    elif not first and triton.cdiv(width, 64) * chosen >= processors:
        wide = 64
    # Sums of the next norm are those of whole runs of columns.
    assert first or wide % _WIDTH_MULTIPLE == 0
    deep = min(256 // size, max(16, triton.next_power_of_2(depth)))
    cut = Config(wide, deep, warps=4 if wide > 16 else 2, stages=4, height=height)
    stages, stage = cut.stages, (wide * (2 if first else 1) + height) * cut.depth * size
    while target is not None and stages > 2 and (stages - 1) * stage > target.shared_bytes:
        stages -= 1
    return cut._replace(stages=stages)


@functools.cache
def choose_packed(
    form: Form,
    width: int,
    depth: int,
    first: bool,
    chosen: int,
    size: int,
    rows: int,
    height: int,
    target: KernelTarget | None,
) -> Config:
    """Return how a product with packed matrices of a form is cut, as `product_cuts.choose_packed` does. Tried on an
    H200.

    The depth is in as many parts as keep a GPU busy with a single row's experts: in more where a turn has fewer
    columns, as a program then has less on its way from memory. A program of its own takes each part where there are
    few, and one takes all where there are enough programs without.
    """
    processors = product_cuts.PROCESSORS if target is None else target.processors
    matrices = max(1, chosen * form.columns // form.halves // _TURN_BYTES)
    cut = product_cuts.choose_packed(form, width, depth, first, None, size, target, min(rows, height), matrices)
    if first and product_cuts.few_registers(target):
        return cut._replace(split=1, serial=False)
    if rows > 1 and cut.height < _ROWS and form.lane_columns:
        # More warps read the same activations, and each program does more for what it costs to begin one.
        cut = cut._replace(width=64 if first else 128, warps=4)
    few = rows * matrices * triton.cdiv(width, cut.width) < _FEW_PROGRAMS * processors
    return cut._replace(serial=cut.split > 1 and not few)
