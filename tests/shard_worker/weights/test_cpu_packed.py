"""Packed matrices as CPUs multiply by them, against the elements of the packed form in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shard_worker.cpu_kernels import native
from shard_worker.weights import cpu_int4
from shard_worker.weights.cpu_codes import CpuCodesWeight
from shard_worker.weights.cpu_int4 import CpuInt4Weight
from shard_worker.weights.packed import Codes, GroupNumbers, PackedWeight, Packing, pack_4_bits
from shard_worker.weights.weight import BlockedWeight, DenseWeight, Weight

TABLE = tuple(float(number) for number in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


def numbers(rows: int, columns: int, group: int, span: int = 0) -> GroupNumbers:
    """Random scales; with a span, small integers times a factor of so many columns."""
    if not span:
        return GroupNumbers(torch.rand(rows, columns // group) + 0.5, group)
    values = torch.randint(1, 64, (rows, columns // group), dtype=torch.uint8)
    return GroupNumbers(values, group, torch.rand(rows, columns // span).half() / 64, span)


def around_8(rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    codes = pack_4_bits(torch.randint(16, (rows, columns)))
    return PackedWeight(Packing(Codes.BITS4, origin=8), codes, numbers(rows, columns, 128), dtype=dtype)


def with_offsets(rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    codes = pack_4_bits(torch.randint(16, (rows, columns)))
    scales, offsets = numbers(rows, columns, 32, 256), numbers(rows, columns, 64)
    offsets = GroupNumbers(offsets.values * -4, 64)
    return PackedWeight(Packing(Codes.BITS4), codes, scales, offsets, dtype=dtype)


def by_table(rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    codes = pack_4_bits(torch.randint(16, (rows, columns)))
    return PackedWeight(Packing(Codes.BITS4, table=TABLE), codes, numbers(rows, columns, 32), dtype=dtype)


def int8(rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    return PackedWeight(Packing(Codes.INT8), codes, numbers(rows, columns, 64), dtype=dtype)


def int8_by_rows(rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    offsets = GroupNumbers(torch.randn(rows, 1) * 8, columns)
    return PackedWeight(Packing(Codes.INT8, origin=3), codes, numbers(rows, columns, columns), offsets, dtype=dtype)


Make = Callable[[int, int, torch.dtype], PackedWeight]
KINDS: tuple[Make, ...] = (around_8, with_offsets, by_table, int8, int8_by_rows)


def error(product: torch.Tensor, packed: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """How far a product is from that in float64, relative to it."""
    exact = x.double() @ packed.unpacked().double().T + (0 if bias is None else bias.double())
    return float((product.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [192, 48])
@pytest.mark.parametrize("make", KINDS)
def test_products_are_those_of_the_elements(make: Make, rows: int, cpu_form: type[Weight]) -> None:
    """For few rows and for so many that all is unpacked; of whole tiles, and of rows that do not fill the last."""
    torch.manual_seed(0)
    packed = make(rows, 512, torch.bfloat16)
    weight, bias = packed.prepared(), torch.randn(rows).bfloat16()
    assert isinstance(weight, cpu_form)
    assert weight.nbytes < packed.rows * packed.columns * 1.4
    for count in (1, 5, 64, 130):
        x = torch.randn(count, 512).bfloat16()
        assert weight.matmul(x).dtype is torch.bfloat16
        assert error(weight.matmul(x), packed, x) < 4e-3
        assert error(weight.matmul(x, bias), packed, x, bias) < 6e-3


@pytest.mark.parametrize("make", KINDS)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(make: Make, cpu_form: type[Weight]) -> None:
    """For any number of rows where that is asked for, and for few rows in any case."""
    torch.manual_seed(1)
    weight, x = make(128, 256, torch.bfloat16).prepared(), torch.randn(150, 256).bfloat16()
    alone = torch.cat([weight.matmul(row[None]) for row in x])
    for count in (2, 3, 4, 7, 16, 33):
        assert torch.equal(weight.matmul(x[5 : 5 + count]), alone[5 : 5 + count])
    assert torch.equal(weight.matmul(x, None, 16), alone)


@pytest.mark.parametrize("make", KINDS)
def test_the_kernels_form_takes_no_more_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner counts the bytes of torch's form, and does not know which of them a host will use."""
    monkeypatch.setattr(native, "multiplies", lambda dtype: False)
    packed = make(128, 256, torch.bfloat16)
    if not CpuCodesWeight.takes(packed):
        pytest.skip("kernels cannot be compiled here")
    assert CpuCodesWeight(packed).nbytes <= CpuInt4Weight(packed).nbytes


@pytest.mark.parametrize("cpu_form", [CpuInt4Weight], indirect=True)
def test_tiles_that_are_not_known_are_not_unpacked(cpu_form: type[Weight], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch lays them out in another way, many rows are multiplied as few are."""
    torch.manual_seed(2)
    assert cpu_int4._are_tiles_known()
    packed, x = int8(128, 256, torch.bfloat16), torch.randn(150, 256).bfloat16()
    weight = packed.prepared()
    monkeypatch.setattr(cpu_int4, "_are_tiles_known", lambda: False)
    assert torch.equal(weight.matmul(x), weight.matmul(x, None, 16))


def groups_of_16(rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    codes = torch.randint(-32, 32, (rows, columns), dtype=torch.int8)
    return PackedWeight(Packing(Codes.INT8), codes, numbers(rows, columns, 16, 256), dtype=dtype)


@pytest.mark.parametrize("cpu_form", [CpuCodesWeight], indirect=True)
@pytest.mark.parametrize("make", [*KINDS, groups_of_16])
def test_the_kernel_takes_small_groups(make: Make, cpu_form: type[Weight]) -> None:
    """Of which torch has no product: few rows, and so many that all is unpacked."""
    torch.manual_seed(3)
    packed = make(48, 256, torch.bfloat16)
    weight = packed.prepared()
    assert isinstance(weight, cpu_form)
    for count in (1, 3, 20, 130):
        x = torch.randn(count, 256).bfloat16()
        product = weight.matmul(x)
        assert product.dtype is torch.bfloat16
        assert error(product, packed, x) < 4e-3
        assert torch.equal(weight.matmul(x[-1:], None, 16), weight.matmul(x, None, 16)[-1:])


@pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")
@pytest.mark.parametrize("own", [True, False], ids=["16 bits", "no 16 bits"])
@pytest.mark.parametrize("pairs", [True, False])
def test_which_codes_the_kernel_takes(own: bool, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All where a CPU multiplies whole numbers by twos; elsewhere those that torch has nothing as fast for."""
    monkeypatch.setattr(native, "multiplies", lambda dtype: own)
    monkeypatch.setattr(native, "multiplies_pairs", lambda: pairs)
    for make in (int8, groups_of_16, around_8):
        assert CpuCodesWeight.takes(make(48, 256, torch.bfloat16)) is (pairs or not own)


@pytest.mark.parametrize(
    "packed",
    [
        PackedWeight(
            Packing(Codes.FLOAT8),
            torch.randn(32, 256).to(torch.float8_e4m3fn),
            numbers(32, 256, 128),
            dtype=torch.bfloat16,
        ),
        PackedWeight(
            Packing(Codes.INT8),
            torch.randint(-128, 128, (32, 256), dtype=torch.int8),
            numbers(32, 256, 16),
            dtype=torch.bfloat16,
        ),
        int8(24, 256, torch.bfloat16),
        int8(32, 256, torch.float32),
        around_8(32, 256, torch.float16),
    ],
    ids=["float8", "groups of 16", "24 rows", "float32", "float16"],
)
@pytest.mark.usefixtures("largest_cpu_form")
def test_what_torch_has_no_product_for_is_unpacked(packed: PackedWeight) -> None:
    weight, x = packed.prepared(), torch.randn(5, 256).to(packed.dtype)
    assert isinstance(weight, DenseWeight | BlockedWeight)
    assert error(weight.matmul(x), packed, x) < (1e-6 if packed.dtype is torch.float32 else 4e-3)
