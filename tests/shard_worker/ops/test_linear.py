"""Packed matrices against the plain product in float64."""

from __future__ import annotations

import pytest
import torch

from shard_worker.ops.linear import linear, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extents", [(64, 32), (96, 3072), (33, 1000), (1, 7)])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 300])
def test_packed_products_are_the_plain_ones(rows: int, extents: tuple[int, int], dtype: torch.dtype) -> None:
    """Any number of rows, odd extents, rows that lie apart, with a bias and without."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(extents).to(dtype), torch.randn(extents[0]).to(dtype)
    x = torch.randn(rows, 2 * extents[1]).to(dtype)[:, : extents[1]]
    made = packed(weight)
    assert (made.shape, made.dtype, made.device) == (weight.shape, weight.dtype, weight.device)
    for added in (None, bias):
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        found = linear(x, made, added)
        assert (found.shape, found.dtype) == (exact.shape, dtype)
        assert (found.double() - exact).norm() <= exact.norm() * (1e-6 if dtype is torch.float32 else 4e-3)


def test_what_is_not_packed_is_used_as_it_is() -> None:
    """Element types that oneDNN has no blocks for."""
    weight = torch.randn(8, 4, dtype=torch.float64)
    assert packed(weight) is weight
    assert torch.equal(linear(torch.eye(4, dtype=torch.float64), weight), weight.T)
