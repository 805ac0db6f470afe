"""Packed matrices against a restatement of their formula, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from shard_worker.weights.packed import (
    Codes,
    GroupNumbers,
    PackedWeight,
    Packing,
    pack_4_bits,
    unpack_4_bits,
)
from shard_worker.weights.weight import DenseWeight, StackedWeight, Weight, concatenate

ROWS, COLUMNS = 6, 512
TABLE = tuple(float(number) for number in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


def affine_4_bits(dtype: torch.dtype) -> tuple[PackedWeight, list[list[float]]]:
    """Groups of 32 with scales of 8 bits times one in float16 for 256 columns, and offsets of the same form."""
    codes = torch.randint(16, (ROWS, COLUMNS))
    scales, offsets = torch.randint(64, (2, ROWS, COLUMNS // 32), dtype=torch.uint8)
    scale_factors, offset_factors = torch.rand(2, ROWS, COLUMNS // 256).half()
    packed = PackedWeight(
        Packing(Codes.BITS4),
        pack_4_bits(codes),
        GroupNumbers(scales, 32, scale_factors, 256),
        GroupNumbers(offsets, 32, offset_factors, 256),
        dtype=dtype,
    )
    expected = [
        [
            codes[row][column].item() * scales[row][column // 32].item() * scale_factors[row][column // 256].item()
            + offsets[row][column // 32].item() * offset_factors[row][column // 256].item()
            for column in range(COLUMNS)
        ]
        for row in range(ROWS)
    ]
    return packed, expected


def by_table(dtype: torch.dtype) -> tuple[PackedWeight, list[list[float]]]:
    """Groups of 16, their scales as they are."""
    codes, scales = torch.randint(16, (ROWS, COLUMNS)), torch.rand(ROWS, COLUMNS // 16)
    packed = PackedWeight(Packing(Codes.BITS4, table=TABLE), pack_4_bits(codes), GroupNumbers(scales, 16), dtype=dtype)
    return packed, [
        [TABLE[codes[row][column]] * scales[row][column // 16].item() for column in range(COLUMNS)]
        for row in range(ROWS)
    ]


def symmetric_4_bits(dtype: torch.dtype) -> tuple[PackedWeight, list[list[float]]]:
    """Groups of 128 around a code of 8."""
    codes, scales = torch.randint(16, (ROWS, COLUMNS)), torch.rand(ROWS, COLUMNS // 128).bfloat16()
    packed = PackedWeight(Packing(Codes.BITS4, origin=8), pack_4_bits(codes), GroupNumbers(scales, 128), dtype=dtype)
    return packed, [
        [(codes[row][column].item() - 8) * scales[row][column // 128].item() for column in range(COLUMNS)]
        for row in range(ROWS)
    ]


def int8(dtype: torch.dtype) -> tuple[PackedWeight, list[list[float]]]:
    """Groups of 32."""
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    scales = torch.rand(ROWS, COLUMNS // 32).half()
    packed = PackedWeight(Packing(Codes.INT8), codes, GroupNumbers(scales, 32), dtype=dtype)
    return packed, [
        [codes[row][column].item() * scales[row][column // 32].item() for column in range(COLUMNS)]
        for row in range(ROWS)
    ]


def float8(dtype: torch.dtype) -> tuple[PackedWeight, list[list[float]]]:
    """Groups of 128."""
    codes = (torch.randn(ROWS, COLUMNS) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(ROWS, COLUMNS // 128)
    packed = PackedWeight(Packing(Codes.FLOAT8), codes, GroupNumbers(scales, 128), dtype=dtype)
    numbers = codes.float()
    return packed, [
        [numbers[row][column].item() * scales[row][column // 128].item() for column in range(COLUMNS)]
        for row in range(ROWS)
    ]


KINDS = (affine_4_bits, by_table, symmetric_4_bits, int8, float8)


@pytest.mark.parametrize("make", KINDS)
def test_elements_are_those_of_the_formula(
    make: Callable[[torch.dtype], tuple[PackedWeight, list[list[float]]]],
) -> None:
    """All of them, some rows of them, and their bytes."""
    torch.manual_seed(0)
    packed, expected = make(torch.float32)
    assert (packed.rows, packed.columns, packed.dtype) == (ROWS, COLUMNS, torch.float32)
    torch.testing.assert_close(packed.unpacked(), torch.tensor(expected), rtol=1e-6, atol=0)
    assert torch.equal(packed.select_rows(slice(2, 5)).unpacked(), packed.unpacked()[2:5])
    assert torch.equal(packed.select_rows(torch.tensor([4, 0])).unpacked(), packed.unpacked()[[4, 0]])
    tensors = [packed.codes, packed.scales.values, packed.scales.factors]
    if packed.offsets is not None:
        tensors += [packed.offsets.values, packed.offsets.factors]
    assert packed.nbytes == sum(tensor.nbytes for tensor in tensors if tensor is not None)
    with pytest.raises(TypeError, match="no dense form"):
        _ = packed.tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", KINDS)
def test_products_are_those_of_the_elements(
    make: Callable[[torch.dtype], tuple[PackedWeight, list[list[float]]]], dtype: torch.dtype
) -> None:
    """With a bias and without, and one row at a time."""
    torch.manual_seed(1)
    packed, expected = make(dtype)
    exact, bias = torch.tensor(expected).double(), torch.randn(ROWS).to(dtype)
    x = torch.randn(5, COLUMNS).to(dtype)
    for added, by in itertools.product((None, bias), (None, 1)):
        product = packed.matmul(x, added, by)
        wanted = x.double() @ exact.T + (0 if added is None else added.double())
        assert product.dtype == dtype
        assert (product.double() - wanted).norm() <= wanted.norm() * (1e-6 if dtype is torch.float32 else 8e-3)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(range(len(KINDS)), repeat=2)))
def test_matrices_stand_below_each_other(first: int, second: int) -> None:
    """Of one form they become one, of unlike forms they stay apart; dense ones among them."""
    torch.manual_seed(2)
    packed = [KINDS[kind](torch.float32)[0] for kind in (first, second)]
    dense = DenseWeight(torch.randn(3, COLUMNS))
    elements = torch.cat([packed[0].unpacked(), packed[1].unpacked()])
    both = concatenate(packed)
    assert isinstance(both, PackedWeight if first == second else StackedWeight)
    x = torch.randn(2, COLUMNS)
    torch.testing.assert_close(both.matmul(x), x @ elements.T, rtol=1e-4, atol=1e-2)
    for parts in ((*packed, dense), (dense, *packed)):
        order: list[torch.Tensor] = [
            part.tensor if isinstance(part, DenseWeight) else part.unpacked()
            for part in parts
            if isinstance(part, Weight)
        ]
        stacked, bias = concatenate(parts).prepared(), torch.randn(2 * ROWS + 3)
        assert (stacked.rows, stacked.columns) == (2 * ROWS + 3, COLUMNS)
        torch.testing.assert_close(stacked.matmul(x, bias), x @ torch.cat(order).T + bias, rtol=1e-4, atol=1e-2)


def test_the_order_of_4_bits() -> None:
    """A byte holds columns that are 32 apart, in blocks of 64."""
    codes = torch.arange(256).remainder(16)[None]
    packed = pack_4_bits(codes)
    for block in range(4):
        for place in range(32):
            byte = packed[0, 32 * block + place].item()
            assert (byte & 15, byte >> 4) == (codes[0, 64 * block + place], codes[0, 64 * block + 32 + place])
    assert torch.equal(unpack_4_bits(packed).long(), codes)
