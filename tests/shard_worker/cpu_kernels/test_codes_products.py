"""The kernels for matrices of codes against the product in float64, to the bit for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as all_of

import pytest
import torch

from shard_worker.cpu_kernels import codes_products, native
from shard_worker.cpu_kernels.codes_kernel import RUN, scratch_size
from shard_worker.cpu_kernels.codes_products import CodesProduct, multiply_each
from tests.combinations import covering

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")

GROUPS = [((16, 64), 64), ((31, 192), 32), ((320, 320), 64), ((12, 384), 128), ((40, 128), 16), ((9, 1024), 1024)]


@pytest.fixture(params=[True, False], ids=["pairs", "any CPU"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products by the instruction that AVX2 has for them, and by those that LLVM finds."""
    if request.param and not native.multiplies_pairs():
        pytest.skip("this CPU has no such instruction")
    monkeypatch.setattr(native, "multiplies_pairs", lambda: request.param)
    codes_products._kernel.cache_clear()
    yield
    codes_products._kernel.cache_clear()


def codes_of(rows: int, columns: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes as they are stored, and as float64 [rows, columns], the middle one as 0."""
    codes = torch.randint(256, (rows, columns * bits // 8), dtype=torch.uint8)
    runs = codes.unflatten(1, (-1, RUN))
    whole = codes if bits == 8 else torch.stack([runs & 15, runs >> 4], 2).flatten(1)
    return codes, whole.double() - (8 if bits == 4 else 128)


@pytest.mark.parametrize(
    ("groups", "bits", "instructions", "threads"),
    # The kernel is compiled anew for each.
    covering(all_of(GROUPS, (4, 8), (True, False), (1, 3))),
    indirect=["instructions", "threads"],
)
def test_codes_are_multiplied_by_their_scales_and_offsets(
    groups: tuple[tuple[int, int], int], bits: int, instructions: None, threads: int
) -> None:
    """Every code, groups of one run and of several, the same bits among any number of rows, a bias and none."""
    (rows, columns), group = groups
    torch.manual_seed(group)
    codes, whole = codes_of(rows, columns, bits)
    numbers, x = torch.randn(rows, columns // group, 2).bfloat16(), torch.randn(23, columns).bfloat16()
    scales, offsets = numbers.double().repeat_interleave(group, 1).unbind(2)
    matrix, bias = whole * scales + offsets, torch.randn(rows).bfloat16()
    product = CodesProduct(codes, numbers, columns)

    assert CodesProduct.takes(rows, columns, bits, group)
    for added in (None, bias):
        together, exact = product.multiply(x, added), x.double() @ matrix.T
        exact = exact if added is None else exact + added.double()
        assert (together.shape, together.dtype) == (exact.shape, torch.bfloat16)
        # Nothing but the result is rounded by as much as it is: half a unit of 8 bits.
        rounded = (exact.to(torch.bfloat16).double() - exact).norm()
        assert (together.double() - exact).norm() <= rounded * 1.01
        for count in (1, 2, 3, 4, 5, 7, 22):
            for first in (0, 23 - count):
                part = slice(first, first + count)
                assert torch.equal(product.multiply(x[part], added), together[part])


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_several_matrices(bits: int, threads: int) -> None:
    """Each run of rows has the bits that it has with its own matrix alone; not all have a bias."""
    torch.manual_seed(bits)
    x, shares, expected = torch.randn(8, 128).bfloat16(), [], []
    for number, count in enumerate((1, 5, 2)):
        matrix = CodesProduct(codes_of(40, 128, bits)[0], torch.randn(40, 2, 2).bfloat16(), 128)
        bias = torch.randn(40).bfloat16() if number else None
        first = sum(count for _, _, count in shares)
        expected.append(matrix.multiply(x[first : first + count], bias))
        shares.append((matrix, bias, count))
    assert shares[0][0].is_like(shares[1][0])
    assert torch.equal(multiply_each(shares, x), torch.cat(expected))
    for rows, groups in ((48, 2), (40, 4)):
        other = CodesProduct(codes_of(rows, 128, bits)[0], torch.randn(rows, groups, 2).bfloat16(), 128)
        assert not other.is_like(shares[0][0])


def test_a_product_beside_others(threads: int) -> None:
    """It is written into some columns of a larger tensor, and nothing else of that is."""
    torch.manual_seed(5)
    product = CodesProduct(codes_of(24, 64, 4)[0], torch.randn(24, 1, 2).bfloat16(), 64)
    x, whole = torch.randn(3, 64).bfloat16(), torch.full((3, 50), 7.0).bfloat16()
    scratch = torch.zeros(scratch_size(product.rounded_row, 3), dtype=torch.uint8)
    product.call(x, None, scratch, whole[:, 10:34]).run()
    assert torch.equal(whole[:, 10:34], product.multiply(x))
    assert torch.equal(whole[:, :10], torch.full((3, 10), 7.0).bfloat16())
    assert torch.equal(whole[:, 34:], torch.full((3, 16), 7.0).bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_whole_numbers_are_exact(bits: int) -> None:
    """Activations of 8 bits lose nothing, in no order: each column has a part in each result."""
    torch.manual_seed(bits)
    codes, whole = codes_of(64, 256, bits)
    numbers = torch.tensor([2.0**-9, 0.0]).bfloat16().expand(64, 4, 2).contiguous()
    x = torch.randint(-127, 128, (5, 256)).bfloat16() * 2.0**-100
    exact = x.double() @ (whole * 2.0**-9).T
    assert torch.equal(CodesProduct(codes, numbers, 256).multiply(x), exact.to(torch.bfloat16))


def test_small_activations_beside_large_ones(threads: int) -> None:
    """They are rounded by a 65536th of the largest one of their span, and not at all in the next span."""
    codes, whole = codes_of(8, 512, 8)
    numbers = torch.tensor([1.0, 0.0]).bfloat16().expand(8, 4, 2).contiguous()
    x = torch.rand(1, 512).bfloat16() / 1000
    x[0, 100] = 1.0
    product = CodesProduct(codes, numbers, 512).multiply(x).double()
    exact = x.double() @ whole.T
    most = whole[:, :256].abs().sum(1) * 2.0**-16 + exact.abs() * 2.0**-8
    assert bool(((product - exact).abs() <= most).all())
    x[0, 100] = 0
    exact = x.double() @ whole.T
    assert torch.equal(CodesProduct(codes, numbers, 512).multiply(x), exact.to(torch.bfloat16))


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-36, 1e36])
def test_activations_of_all_sizes(size: float) -> None:
    """None, less than a normal number, and nearly as much as there is."""
    codes, whole = codes_of(16, 64, 8)
    numbers = torch.tensor([2.0**-20, 0.0]).bfloat16().expand(16, 1, 2).contiguous()
    x = (torch.rand(3, 64) * size).bfloat16()
    product, exact = CodesProduct(codes, numbers, 64).multiply(x).double(), x.double() @ (whole * 2.0**-20).T
    assert (product - exact).norm() <= exact.norm() * 2e-3 + 1e-37


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_makes_none(odd: float) -> None:
    """In its own row; the others are as they were."""
    codes, _ = codes_of(16, 512, 4)
    numbers, x = torch.randn(16, 8, 2).bfloat16(), torch.randn(5, 512).bfloat16()
    product = CodesProduct(codes, numbers, 512)
    before = product.multiply(x)
    x[2, 300] = odd
    after = product.multiply(x)
    assert bool(after[2].isnan().all())
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_rows_that_lie_apart() -> None:
    """Activations may be columns of something wider."""
    codes, _ = codes_of(24, 64, 4)
    product, x = CodesProduct(codes, torch.randn(24, 1, 2).bfloat16(), 64), torch.randn(5, 96).bfloat16()[:, 16:80]
    assert torch.equal(product.multiply(x), product.multiply(x.contiguous()))


def test_what_they_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, columns that make no whole steps, and nothing where kernels cannot be compiled."""
    assert CodesProduct.takes(8, 64, 4, 32)
    assert not CodesProduct.takes(8, 32, 4, 32)
    assert not CodesProduct.takes(8, 48, 8, 16)
    assert not CodesProduct.takes(7, 64, 8, 64)
    monkeypatch.setattr(codes_products, "is_available", lambda: False)
    assert not CodesProduct.takes(8, 64, 4, 32)
