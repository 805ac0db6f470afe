"""Every type of GGUF's blocks against the format's own library, with random bytes: all bits of a block count."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from services.errors import Unimplemented
from services.model.gguf import blocks
from services.model.gguf.blocks import BLOCK_TYPES, SERVED, BlockType
from shard_worker.model.kernels.codes import form_of
from shard_worker.weights.gguf_blocks import unpack_blocks
from shard_worker.weights.packed import Codes
from shard_worker.weights.tiled import TiledWeight, tiling_of

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}
PACKED = [name for name in SERVED if KINDS[name].held is not None]
FLOAT16_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "IQ4_NL": (0,),
}
"""Where blocks have float16 numbers; two at the start where nothing is said."""


def random_rows(kind: BlockType, rows: int, columns: int) -> np.ndarray:
    """Return rows of blocks of random bytes, whose float16 numbers are finite."""
    random = np.random.default_rng(7)
    data = random.integers(0, 256, (rows * (columns // kind.values), kind.bytes), dtype=np.uint8)
    if kind.name not in ("MXFP4", "NVFP4"):
        for at in FLOAT16_AT.get(kind.name, (0,) if kind.name.startswith("IQ") else (0, 2)):
            numbers = random.standard_normal(len(data)).astype(np.float16)
            data[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    else:
        data[: len(data) // 2 : 2, 0], data[1 : len(data) // 2 : 2, 0] = 0, 1  # MXFP4's smallest scales
    return data.reshape(rows, -1)


@np.errstate(over="ignore")
def values_of(data: np.ndarray, name: str) -> np.ndarray:
    values: np.ndarray = gguf.dequantize(data, gguf.GGMLQuantizationType[name])
    return values


@pytest.mark.parametrize("name", PACKED)
def test_values_are_the_librarys_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_worker.weights.gguf_blocks._VALUES_AT_A_TIME", {"cpu": 2048})
    kind = KINDS[name]
    data = random_rows(kind, 5, 1024)
    weight = unpack_blocks(kind, torch.from_numpy(data), torch.bfloat16)
    expected = values_of(data, name)
    assert np.array_equal(weight.unpacked().numpy(), expected)
    assert (weight.rows, weight.columns, weight.dtype) == (5, 1024, torch.bfloat16)
    assert weight.nbytes == 5 * kind.held_row_bytes(1024)
    assert weight.packing.codes is (Codes.BITS4 if kind.held_bits(1024) == 4 else Codes.INT8)


@pytest.mark.parametrize("name", PACKED)
def test_kernels_know_the_form(name: str) -> None:
    """As files have it, and with value heads in another order."""
    kind = KINDS[name]
    weight = unpack_blocks(kind, torch.from_numpy(random_rows(kind, 1, 5120)), torch.bfloat16)
    for matrix in (weight, weight.with_columns(torch.arange(40), 128)):
        assert form_of(TiledWeight(matrix, tiling_of(matrix, lane_columns=2))).lane_columns


@pytest.mark.parametrize("name", [name for name in PACKED if KINDS[name].values == 32])
def test_rows_that_are_not_blocks_of_64_are_widened(name: str) -> None:
    kind = KINDS[name]
    data = random_rows(kind, 3, 96)
    weight = unpack_blocks(kind, torch.from_numpy(data), torch.float32)
    assert np.array_equal(weight.unpacked().numpy(), values_of(data, name))
    assert weight.packing.codes is Codes.INT8
    assert weight.nbytes == 3 * kind.held_row_bytes(96)


@pytest.mark.parametrize("run", [128, 48, 16])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_columns_in_another_order_are_the_same_numbers(name: str, run: int) -> None:
    kind = KINDS[name]
    data = random_rows(kind, 3, 768)
    order = torch.randperm(768 // run, generator=torch.Generator().manual_seed(1))
    moved = unpack_blocks(kind, torch.from_numpy(data), torch.float32).with_columns(order, run)
    expected = values_of(data, name).reshape(3, -1, run)[:, order.numpy()].reshape(3, -1)
    assert np.array_equal(moved.unpacked().numpy(), expected)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(
        Unimplemented, match="IQ1_S is not served, only F32, .*Q4_K.*convert the file to Q4_K_M or Q8_0"
    ):
        unpack_blocks(KINDS["IQ1_S"], torch.zeros(1, 50, dtype=torch.uint8), torch.float32)
    assert set(PACKED) == set(blocks.SERVED) - set(blocks.DENSE)
