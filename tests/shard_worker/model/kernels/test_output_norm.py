"""The norm behind a sublayer with what follows it, against plain torch, and of a row alone against the same row among
others."""

from __future__ import annotations

import pytest
import torch

from shard_worker.ops.norm import rms_norm
from shard_worker.weights.random_packed import random_packed
from shard_worker.weights.tiled import TiledWeight, tiling_of
from tests.shard_worker.model.kernels.machine import DTYPE, LANE_COLUMNS, ON_GPU, device, seldom

pytestmark = pytest.mark.gpu

DEPTH, EPS = 64, 1e-6


@pytest.mark.parametrize(("rows", "width", "scaled"), [(3, 80, False), seldom(17, 1056, True)])
@torch.inference_mode()
def test_a_normed_product_joins_the_residual_stream(rows: int, width: int, scaled: bool) -> None:
    """So wide that several programs share a row, and more rows than those of a tile: what plain torch makes, and a row
    has the same bits by itself."""
    from shard_worker.model.kernels.matmul import Normed, linear
    from shard_worker.model.kernels.output_norm import add_normed

    on, generator = device().torch_device, torch.Generator().manual_seed(width)
    x, weight = (torch.randn(shape, generator=generator).to(on, DTYPE) for shape in ((rows, DEPTH), (width, DEPTH)))
    residual = torch.randn(rows, width, generator=generator).to(on, DTYPE)
    behind, following = (torch.rand(width, generator=generator).to(on) + 0.5 for _ in range(2))
    scale = torch.tensor([0.75], device=on) if scaled else None

    product, made = linear(x, weight, norm=behind, eps=EPS)
    assert isinstance(made, Normed)
    found, normed = add_normed(made, residual, following, EPS, scale=scale)
    last, nothing = add_normed(made, residual, None, EPS, scale=scale)

    expected = (residual + rms_norm(product, behind, EPS)) * (0.75 if scaled else 1.0)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert normed is not None
    torch.testing.assert_close(normed.scaled, (found.float() * following).to(DTYPE))
    torch.testing.assert_close(normed.squares.sum(1), found.float().square().sum(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(last, found)
    assert nothing is None
    for row in (0, rows - 1):
        alone = Normed(made.scaled[row : row + 1], made.squares[row : row + 1], EPS)
        one, after = add_normed(alone, residual[row : row + 1], following, EPS, scale=scale)
        assert after is not None
        assert torch.equal(one[0], found[row])
        assert torch.equal(after.scaled[0], normed.scaled[row])
        assert torch.equal(after.squares[0], normed.squares[row])


@torch.inference_mode()
def test_rows_go_through_two_norms_beside_each_other() -> None:
    """The first one's as if it were alone; the second one's have its own weights and sums, and the same factors."""
    from shard_worker.model.kernels.matmul import SQUARES_WIDTH, Normed, linear
    from shard_worker.model.kernels.output_norm import add_normed, add_normed_for_two

    on, generator = device().torch_device, torch.Generator().manual_seed(1)
    rows, width = 17 if ON_GPU else 3, 1280
    x, weight = (torch.randn(shape, generator=generator).to(on, DTYPE) for shape in ((rows, DEPTH), (width, DEPTH)))
    residual = torch.randn(rows, width, generator=generator).to(on, DTYPE)
    behind, first, second = (torch.rand(width, generator=generator).to(on) + 0.5 for _ in range(3))
    packed = random_packed("q4_k", 1, width, DTYPE, on)
    reader = TiledWeight(packed, tiling_of(packed, lane_columns=LANE_COLUMNS))

    _, made = linear(x, weight, norm=behind, eps=EPS)
    assert isinstance(made, Normed)
    found, one, other = add_normed_for_two(made, residual, (first, second), EPS, then=(None, reader))
    alone, usual = add_normed(made, residual, first, EPS)

    assert usual is not None
    assert torch.equal(found, alone)
    assert torch.equal(one.scaled, usual.scaled)
    assert torch.equal(one.squares, usual.squares)
    assert other.factors is one.factors
    assert one.sums is None
    assert other.sums is not None
    torch.testing.assert_close(other.scaled, (found.float() * second).to(DTYPE))
    runs = other.scaled.float().view(rows, -1, SQUARES_WIDTH).sum(2)
    torch.testing.assert_close(other.sums, runs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "width", "scaled"), [(3, 80, False), seldom(17, 1312, True)])
@torch.inference_mode()
def test_two_normed_products_join_the_residual_stream_by_a_norm(rows: int, width: int, scaled: bool) -> None:
    """What plain torch makes, for widths of one run of a sum's columns and of more; a row has the same bits by
    itself."""
    from shard_worker.model.kernels.matmul import Normed, linear
    from shard_worker.model.kernels.output_norm import add_both

    on, generator = device().torch_device, torch.Generator().manual_seed(width)
    x = torch.randn(rows, DEPTH, generator=generator).to(on, DTYPE)
    matrices = [torch.randn(width, DEPTH, generator=generator).to(on, DTYPE) for _ in range(2)]
    residual = torch.randn(rows, width, generator=generator).to(on, DTYPE)
    first, second, both, following = (torch.rand(width, generator=generator).to(on) + 0.5 for _ in range(4))
    scale = torch.tensor([0.75], device=on) if scaled else None

    products, made = [], []
    for weight, norm in zip(matrices, (first, second), strict=True):
        product, normed = linear(x, weight, norm=norm, eps=EPS)
        assert isinstance(normed, Normed)
        products.append(rms_norm(product, norm, EPS))
        made.append(normed)
    found, after = add_both(*made, both, residual, following, EPS, scale=scale)

    expected = (residual + rms_norm(products[0] + products[1], both, EPS)) * (0.75 if scaled else 1.0)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert after is not None
    torch.testing.assert_close(after.scaled, (found.float() * following).to(DTYPE))
    torch.testing.assert_close(after.squares.sum(1), found.float().square().sum(1), rtol=1e-4, atol=1e-4)
    for row in (0, rows - 1):
        own = slice(row, row + 1)
        alone = [Normed(one.scaled[own], one.squares[own], EPS) for one in made]
        out, behind = add_both(*alone, both, residual[own], following, EPS, scale=scale)
        assert behind is not None
        assert torch.equal(out[0], found[row])
        assert torch.equal(behind.scaled[0], after.scaled[row])
        assert torch.equal(behind.squares[0], after.squares[row])
