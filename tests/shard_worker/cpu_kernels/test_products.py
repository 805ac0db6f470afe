"""The kernel for dense matrices of 16 bits against the product in float64, to the bit for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shard_worker.cpu_kernels import native, products
from shard_worker.cpu_kernels.products import Product

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")


@pytest.fixture(params=[8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many float32 a vector has: wider ones than the CPU's are made of two."""
    monkeypatch.setattr(products, "lanes", lambda: request.param)
    products._kernel.cache_clear()
    yield request.param
    products._kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extents", [(8, 16), (9, 48), (31, 64), (320, 176)])
def test_a_row_is_the_plain_product_among_any_number_of_rows(
    extents: tuple[int, int], dtype: torch.dtype, lanes: int, threads: int
) -> None:
    """Rows of a matrix that make no whole blocks, more threads than blocks, a bias and none."""
    torch.manual_seed(extents[0])
    matrix, x = torch.randn(extents).to(dtype), torch.randn(23, extents[1]).to(dtype)
    product, bias = Product(matrix), torch.randn(extents[0]).to(dtype)
    for added in (None, bias):
        whole = product.multiply(x, added)
        exact = x.double() @ matrix.double().T + (0 if added is None else added.double())
        assert (whole.shape, whole.dtype) == (exact.shape, dtype)
        assert (whole.double() - exact).norm() <= exact.norm() * (4e-3 if dtype is torch.bfloat16 else 4e-4)
        for count in (1, 2, 3, 4, 5, 7, 22):
            for first in (0, 23 - count):
                part = slice(first, first + count)
                assert torch.equal(product.multiply(x[part], added), whole[part])


def test_numbers_of_all_sizes(lanes: int) -> None:
    """Every 16-bit float is widened to itself: the smallest ones, infinities, and what is no number."""
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        one = torch.zeros(1, 16, dtype=dtype)
        one[0, 5] = 1
        matrix = torch.zeros(1 << 16, 16, dtype=dtype)
        matrix[:, 5] = every
        torch.testing.assert_close(Product(matrix).multiply(one)[0], every, rtol=0, atol=0, equal_nan=True)


def test_rows_that_lie_apart(lanes: int) -> None:
    """Activations and the matrix may be columns of something wider."""
    matrix, x = torch.randn(24, 96).bfloat16()[:, 32:64], torch.randn(5, 64).bfloat16()[:, :32]
    assert Product.takes(matrix)
    apart, beside = Product(matrix), Product(matrix.contiguous())
    assert torch.equal(apart.multiply(x), beside.multiply(x.contiguous()))


def test_what_it_does_not_take() -> None:
    """Other element types, few rows, columns that fill no vector, columns that lie apart."""
    assert Product.takes(torch.zeros(8, 16, dtype=torch.bfloat16))
    for matrix in (
        torch.zeros(8, 16),
        torch.zeros(7, 16, dtype=torch.bfloat16),
        torch.zeros(8, 20, dtype=torch.bfloat16),
        torch.zeros(16, 8, dtype=torch.bfloat16).T,
    ):
        assert not Product.takes(matrix)


def test_nothing_is_taken_where_kernels_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own products serve there."""
    monkeypatch.setattr(products, "is_available", lambda: False)
    assert not Product.takes(torch.zeros(8, 16, dtype=torch.bfloat16))
