"""The norm behind a sublayer with what follows it, against plain torch, and of a row alone against the same row among
others."""

from __future__ import annotations

import pytest
import torch

from shard_worker.ops.norm import rms_norm
from tests.shard_worker.model.kernels.machine import DTYPE, device

pytestmark = pytest.mark.gpu

DEPTH, EPS = 64, 1e-6


@pytest.mark.parametrize(("rows", "width", "scaled"), [(3, 80, False), (17, 1056, True)])
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
