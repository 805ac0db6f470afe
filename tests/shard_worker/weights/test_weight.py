"""Matrices in both forms against the plain product in float64."""

from __future__ import annotations

import pytest
import torch

from shard_worker.weights.weight import BlockedWeight, DenseWeight, Weight, concatenate
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
