"""Matrices in both forms against the plain product in float64."""

from __future__ import annotations

import pytest
import torch

from shard_worker.cpu_kernels import native
from shard_worker.cpu_kernels.products import Product
from shard_worker.weights.weight import (
    BlockedWeight,
    DenseWeight,
    ReorderedWeight,
    StackedWeight,
    Weight,
    WidenedWeight,
    concatenate,
)
from tests.shard_worker.allocated import allocated_bytes


def check_product(weight: Weight, matrix: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The weight's product is that of the matrix, to the precision of its element type."""
    product = weight.matmul(x, bias)
    exact = x.double() @ matrix.double().T + (0 if bias is None else bias.double())

    assert (product.shape, product.dtype) == (exact.shape, matrix.dtype)
    assert (product.double() - exact).norm() <= exact.norm() * (1e-6 if matrix.dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extents", [(64, 32), (96, 3072), (33, 1000), (1, 7)])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 300])
def test_products_are_the_plain_ones(rows: int, extents: tuple[int, int], dtype: torch.dtype) -> None:
    """Dense and prepared, any number of rows, odd extents, rows that lie apart, with a bias and without."""
    torch.manual_seed(rows)
    matrix, bias = torch.randn(extents).to(dtype), torch.randn(extents[0]).to(dtype)
    x = torch.randn(rows, 2 * extents[1]).to(dtype)[:, : extents[1]]
    dense = DenseWeight(matrix)
    for weight in (dense, dense.prepared()):
        assert (weight.rows, weight.columns, weight.dtype, weight.device) == (*extents, dtype, matrix.device)
        assert weight.nbytes == matrix.nbytes
        for added in (None, bias):
            check_product(weight, matrix, x, added)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("extents", [(1000, 3072), (33, 1008), (1, 7)])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 300])
def test_products_without_instructions_for_16_bits(
    rows: int, extents: tuple[int, int], dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix stays as it is and is widened, by a kernel or in memory; a row is the same to the bit with other rows,
    where as many are asked for."""
    monkeypatch.setattr(native, "multiplies", lambda dtype: False)
    if not kernel:
        monkeypatch.setattr(Product, "takes", lambda matrix: False)
    torch.manual_seed(rows)
    matrix, bias = torch.randn(extents).to(dtype), torch.randn(extents[0]).to(dtype)
    x = torch.randn(rows, 2 * extents[1]).to(dtype)[:, : extents[1]]
    weight = DenseWeight(matrix).prepared()

    assert isinstance(weight, WidenedWeight) is (kernel and extents != (1, 7))
    assert weight.tensor is matrix
    assert weight.prepared() is weight
    for added in (None, bias):
        check_product(weight, matrix, x, added)
        together = weight.matmul(x, added, 16)
        assert torch.equal(together[-1:], weight.matmul(x[-1:], added, 16))


def test_what_has_no_blocks_stays_dense() -> None:
    """Element types that oneDNN has no blocks for are multiplied as they are."""
    matrix = torch.randn(8, 4, dtype=torch.float64)
    weight = DenseWeight(matrix).prepared()

    assert weight.tensor is matrix
    assert torch.equal(weight.matmul(torch.eye(4, dtype=torch.float64)), matrix.T)


def test_rows_are_selected_and_concatenated() -> None:
    """By slice or by index, and one matrix behind the other."""
    matrix = torch.arange(24.0).view(6, 4)
    weight = DenseWeight(matrix)

    assert torch.equal(weight.select_rows(slice(1, 3)).tensor, matrix[1:3])
    assert torch.equal(weight.select_rows(torch.tensor([5, 0])).tensor, matrix[[5, 0]])
    assert concatenate([weight]) is weight
    joined = concatenate([weight, weight.select_rows(slice(0, 2))])
    assert (joined.rows, joined.columns) == (8, 4)
    assert torch.equal(joined.tensor, torch.cat((matrix, matrix[:2])))


def test_blocks_are_final() -> None:
    """A matrix in oneDNN's blocks says that it can be neither cut, joined nor read as a dense one."""
    blocked = BlockedWeight(torch.randn(8, 4))

    for use in (lambda: blocked.tensor, lambda: blocked.select_rows(slice(2)), lambda: concatenate([blocked, blocked])):
        with pytest.raises(TypeError, match="blocks"):
            use()


def test_prompts_of_all_lengths_take_no_more_memory() -> None:
    """oneDNN keeps half a MiB for each number of rows that it has multiplied; few of them stand for all."""
    weight = BlockedWeight(torch.randn(96, 64))
    before = allocated_bytes()
    for rows in range(17, 257):
        x = torch.randn(rows, 64)
        assert weight.matmul(x).shape == (rows, 96)
    assert allocated_bytes() - before < 12 << 20


@pytest.mark.parametrize("rows", [slice(0, 9), slice(2, 5), slice(3, 9), slice(4, None), slice(6, 8)])
def test_runs_of_rows_are_taken_out_of_unlike_forms(rows: slice) -> None:
    """From one part, from several, and from where one ends."""
    first, second, order = torch.randn(4, 6), torch.randn(5, 6), torch.tensor([2, 0, 5, 4, 1, 3])
    reordered = ReorderedWeight(DenseWeight(second[:, order]), order.int())
    x = torch.randn(3, 6)

    part = concatenate([DenseWeight(first), reordered]).select_rows(rows)

    torch.testing.assert_close(part.matmul(x), x @ torch.cat((first, second))[rows].T)


def test_columns_in_another_order() -> None:
    """Products and rows looked up are those of the columns in their own order; two in one order stay one matrix."""
    matrix, order = torch.randn(6, 5), torch.tensor([3, 1, 4, 0, 2])
    weight = ReorderedWeight(DenseWeight(matrix[:, order]), order.int())
    x, bias = torch.randn(2, 5), torch.randn(6)

    check_product(weight, matrix, x, bias)
    check_product(weight.prepared(), matrix, x, bias)
    assert torch.equal(weight.lookup(torch.tensor([4, 0])), matrix[[4, 0]])
    assert weight.nbytes == matrix.nbytes + 5 * 4
    with pytest.raises(TypeError, match="no dense form"):
        _ = weight.tensor
    both = concatenate([weight, weight.select_rows(torch.tensor([1, 5]))])
    assert isinstance(both, ReorderedWeight)
    check_product(both, torch.cat((matrix, matrix[[1, 5]])), x, None)
    other = ReorderedWeight(DenseWeight(matrix), torch.arange(5, dtype=torch.int32))
    apart = concatenate([weight, other, DenseWeight(matrix)])
    assert isinstance(apart, StackedWeight)
    check_product(apart, torch.cat((matrix, matrix, matrix)), x, None)
