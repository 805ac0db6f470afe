"""How a product is cut into programs: chosen for its shape, the form of its matrix, the rows and the GPU.

Parts of the depth are the same for any number of rows, so that a row's result is too; all else is for speed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from shard_worker.device.devices import KernelTarget
from shard_worker.model.kernels.codes import Form, multiplies_apart

TILE_ROWS = 16
"""Rows of the smallest tile, and of every tile where a matrix instruction for more rows sums in another order."""

UNIT = 256
"""A part of the depth has a multiple of so many columns, but for the last one; tiles' depths divide it."""

_SHORT_TURN = 128
"""Columns whose codes a program holds beside the sums of 64 rows of gates and ups."""

_RESIDENT_WARPS = 8
"""Warps for whose sums of packed products a processor has registers."""

PROCESSORS = 128
"""Of a GPU that nothing is known of."""


class Config(NamedTuple):
    """How a product is cut.

    width, depth: of a tile of weights. split: parts of the depth. warps: of a program. stages: tiles that are on their
    way at a time. height: rows of a tile. serial: one program sums up all parts of a tile; otherwise each has a program
    of its own. descriptors: tiles are fetched by the GPU's engine for tensors. swapped: then the tile of weights is the
    first operand of the matrix instruction, which takes 64 rows of that one and fewer of the other.
    """

    width: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    height: int = TILE_ROWS
    serial: bool = False
    descriptors: bool = False
    swapped: bool = False


@functools.cache
def choose(
    width: int,
    depth: int,
    paired: bool,
    head_dim: int | None,
    size: int,
    target: KernelTarget | None,
    rows: int = TILE_ROWS,
) -> Config:
    """Return the cut for a shape and a number of rows. Tried on an H200.

    The parts of the depth are the same for any number of rows, so that a row's result is too. size: of an element, in
    bytes; tiles of wider elements have as many bytes, and as many stages as there is shared memory for.
    """
    config = _choose_for_few(width, depth, paired, head_dim, size, target)
    if rows <= TILE_ROWS or target is None or target.one_tile_height or size != 2:
        return config
    if target.tensor_engine and depth % 8 == 0:
        return _choose_for_many(config.split, width, paired, head_dim, target, rows)
    # More rows would be another matrix instruction on some GPUs.
    return config._replace(height=2 * TILE_ROWS, stages=2) if config.width <= 128 else config


def _choose_for_few(
    width: int, depth: int, paired: bool, head_dim: int | None, size: int, target: KernelTarget | None
) -> Config:
    """Return the cut for up to 16 rows."""
    if head_dim is not None:
        config, enough = Config(head_dim, 128 if head_dim <= 128 else 64, stages=4), 96
    elif paired:
        config, enough = Config(32, 128, stages=4), 96
    elif width >= 16384:
        config, enough = Config(128, 128, stages=4), 1
    else:
        config, enough = Config(32, 256, stages=3), 192
    blocks, split = triton.cdiv(width, config.width), 1
    # Of heads, whose tiles are wide, some programs of 1024 columns are faster than twice as many of half of them.
    twice = 2048 if head_dim is not None and head_dim <= 128 else 1024
    while blocks * split < enough and split < 8 and depth >= (1024 if split == 1 else twice) * split:
        split *= 2
    config = config._replace(depth=config.depth * 2 // size)
    stages, stage = config.stages, (config.width * (2 if paired else 1) + 16) * config.depth * size
    while target is not None and stages > 2 and (stages - 1) * stage > target.shared_bytes:
        stages -= 1
    return config._replace(split=split, stages=stages)


def _choose_for_many(
    split: int, width: int, paired: bool, head_dim: int | None, target: KernelTarget, rows: int
) -> Config:
    """Return the cut for more than 16 rows: tiles so large that each of the GPU's processors gets about one."""
    swapped = rows <= 32 and (head_dim is None or head_dim >= 64)
    lowest = 32 if swapped else 64
    highest, serial, resident = max(lowest, min(256, triton.next_power_of_2(rows))), False, 1

    def programs(tile: tuple[int, int]) -> int:
        return triton.cdiv(rows, tile[0]) * triton.cdiv(width, tile[1])

    if paired:
        # There are two tiles of weights, and two of sums.
        if swapped and programs((lowest, 128)) <= target.processors:
            tile = lowest, 128
        else:
            tile = (lowest, 64) if highest < 256 else (128, 64) if rows <= 256 else (128, 128)
        resident = programs(tile) // target.processors + 1 if tile == (lowest, 64) else 1
    elif split == 1 and head_dim is None:
        tile = highest, 128
    else:
        tiles = [(lowest, 64), (lowest, 128), (128, 128)] if head_dim is None else [(lowest, head_dim), (128, head_dim)]
        tiles = [(height, wide) for height, wide in tiles if height * wide <= 128 * 128]
        serial = split > 1 and programs(tiles[0]) * split > target.processors
        fitting = [tile for tile in tiles if programs(tile) <= target.processors]
        tile = fitting[0] if fitting else (lowest, head_dim or 128)
        resident = programs(tile) // target.processors + 1 if serial else 1
    height, wide = tile
    resident = min(resident, 3 if height * wide <= 64 * 128 else 1)
    depth = 128 if resident == 1 and height * wide <= 64 * 128 and not paired else 64
    sums = wide * (2 if paired else 1)
    stage = (height + sums) * depth * 2
    return Config(
        wide,
        depth,
        split,
        warps=8 if height * wide >= 128 * 128 else 4,
        stages=min(4 if sums > 128 else 6, (target.shared_bytes // resident - 1024) // stage),
        height=height,
        serial=serial,
        descriptors=True,
        swapped=swapped,
    )


@functools.cache
def choose_packed(
    form: Form,
    width: int,
    depth: int,
    paired: bool,
    head_dim: int | None,
    size: int,
    target: KernelTarget | None,
    rows: int = TILE_ROWS,
    matrices: int = 1,
) -> Config:
    """Return the cut for a packed matrix of a form, as `choose` does for dense ones. Tried on an H100 and an H200.

    matrices: how many of its shape a row is multiplied by.

    A warp holds 16 or 32 rows of weights, so that each thread looks up few groups' numbers. A single row of
    activations is a tile of its own where its groups are multiplied apart, and up to 8 are one of half the height. More
    rows of activations than 16 take tiles as high as registers and sums in one order allow. For more than 8 of them
    four warps of Hopper's multiply 16 rows of weights each together, unless lanes read 4 neighbouring columns and a
    turn has the offsets of so many groups that registers are few.
    """
    processors = PROCESSORS if target is None else target.processors
    shared = 64 << 10 if target is None else target.shared_bytes
    few = rows <= TILE_ROWS
    long = form.columns > _SHORT_TURN
    numerous = form.offset != "" and form.columns // form.group > 4
    together = target is not None and target.tensor_engine and not (numerous and form.lane_columns == 4)
    if form.lane_columns:
        wide = head_dim or (64 if (together and rows > TILE_ROWS // 2) or not (few or paired) else 32)
        warps = 4 if together and wide == 64 and not head_dim else max(2, wide // 32)
    else:
        wide = head_dim or (64 if paired or width <= 64 * processors else 128)
        # CDNA's warps are twice as large, and have twice the registers.
        warps = max(1, min(4, wide // 16) if target is not None and target.lane_registers > 256 else wide // 16)
    if rows == 1 and multiplies_apart(form):
        height = 1
    elif rows <= TILE_ROWS // 2 and form.lane_columns:
        height = TILE_ROWS // 2
    elif few or target is None or target.one_tile_height:
        height = TILE_ROWS
    else:
        # Pairs have twice the sums, and of a long turn twice the codes.
        high = together and not (long and (paired or head_dim))
        height = min(64 if high else 32, triton.next_power_of_2(rows))
    split = split_packed(matrices * triton.cdiv(width, 32), depth, processors)
    # Only activations pass through shared memory.
    stages = max(2, min(3, shared // 4 // (height * form.columns * size) + 1))
    programs = triton.cdiv(width, wide) * triton.cdiv(rows, height)
    # A pair's sums of a part and of all parts are more than they hold.
    crowded = paired and few_registers(target)
    serial = split > 1 and not few and not crowded and _as_balanced(programs, split, warps, processors)
    return Config(wide, form.columns, split, warps, stages, height, serial)


def _as_balanced(programs: int, split: int, warps: int, processors: int) -> bool:
    """Return whether so many programs that take all parts of a sum, one after the other, keep processors as busy to the
    end as those of a part each."""
    resident = max(1, _RESIDENT_WARPS // warps)
    return all(
        triton.cdiv(programs, places) * split <= 1.05 * triton.cdiv(programs * split, places)
        for places in (processors, processors * resident)
    )


def few_registers(target: KernelTarget | None) -> bool:
    """Return whether a thread has few registers for what it multiplies, as on RDNA."""
    return target is not None and target.one_tile_height and target.lane_registers <= 256


def split_packed(blocks: int, depth: int, processors: int) -> int:
    """Return into how many parts the depth is cut for blocks of 32 rows, so that every processor is kept busy by some
    programs, and waits for none long at the end."""
    split = 1
    while split < 8 and blocks * split < 4.5 * processors and depth >= 4 * UNIT * split:
        split *= 2
    return split
