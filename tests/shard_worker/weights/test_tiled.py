"""Packed matrices in tiles: the same elements, whichever rows are asked for, and refusals by what does not fit."""

from __future__ import annotations

import weakref

import pytest
import torch

from shard_worker.weights.packed import GroupNumbers, PackedWeight
from shard_worker.weights.random_packed import KINDS, random_packed
from shard_worker.weights.tiled import TILE_ROWS, TiledWeight, tiling_of

CPU = torch.device("cpu")


def packed(kind: str, rows: int, columns: int) -> PackedWeight:
    return random_packed(kind, rows, columns, torch.bfloat16, CPU)


@pytest.mark.parametrize("lane_columns", [0, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_hold_the_matrix(kind: str, lane_columns: int) -> None:
    """All rows, a run of them that begins and ends within tiles, and single ones; the last tile may be partial."""
    for rows, columns in ((40, 256), (16, 512), (33, 768)):
        weight = packed(kind, rows, columns)
        tiled = TiledWeight(weight, tiling_of(weight, lane_columns=lane_columns))
        assert torch.equal(tiled.unpacked(), weight.unpacked())
        assert torch.equal(tiled.unpacked(slice(5, 15)), weight.unpacked(slice(5, 15)))
        indices = torch.tensor([3, 1, rows - 1])
        assert torch.equal(tiled.lookup(indices), weight.lookup(indices))
        assert tiled.nbytes <= weight.nbytes * -(-rows // TILE_ROWS) * TILE_ROWS / rows
        x = torch.randn(2, columns, dtype=torch.bfloat16)
        assert torch.equal(tiled.matmul(x), weight.matmul(x))


def test_of_what_tiles_were_made_of_nothing_stays() -> None:
    """While a model is loaded there is one matrix beside its tiles at a time, not all of them."""
    made = packed("q4_k", 32, 256)
    memory = made.codes.numpy().copy()
    weight = made.with_rows(torch.from_numpy(memory), made.scales, made.offsets)
    tiled, source = TiledWeight(weight, tiling_of(weight, lane_columns=2)), weakref.ref(memory)
    del weight, memory
    assert source() is None
    assert torch.equal(tiled.unpacked(), made.unpacked())


def test_a_tile_has_rows_side_by_side() -> None:
    """A row of a tile begins 64 bytes behind the one before it; in the order of lanes, its words change places."""
    weight = packed("int8", 32, 128)
    codes = weight.codes.view(torch.uint8)
    plain, fours, twos = (
        TiledWeight(weight, tiling_of(weight, lane_columns=lane_columns)).codes for lane_columns in (0, 4, 2)
    )
    assert torch.equal(plain[0, 64:128], codes[1, :64])
    assert torch.equal(plain[0, 1024:1088], codes[0, 64:128])
    assert torch.equal(fours[0, 64:68], codes[1, :4])
    assert torch.equal(fours[0, 68:72], codes[1, 16:20])
    assert torch.equal(fours[0, 80:84], codes[1, 4:8])
    assert torch.equal(twos[0, 64:68], codes[1, [0, 1, 8, 9]])
    assert torch.equal(twos[0, 68:72], codes[1, [16, 17, 24, 25]])
    assert torch.equal(twos[0, 80:84], codes[1, [2, 3, 10, 11]])


@pytest.mark.parametrize(
    ("columns", "group", "reason"), [(96, 32, "96 columns"), (192, 48, "groups of 48 columns, and 16, 32, 64")]
)
def test_what_fits_no_tile_is_refused_with_the_reason(columns: int, group: int, reason: str) -> None:
    weight = packed("int8", 16, columns * 2)
    scales = GroupNumbers(torch.ones(16, columns // group), group)
    weight = PackedWeight(weight.packing, weight.codes[:, :columns], scales, dtype=weight.dtype)
    with pytest.raises(ValueError, match=reason):
        tiling_of(weight, lane_columns=2)
