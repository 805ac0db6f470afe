"""The end of a recurrent mixer's rows against plain torch, with the sums that a packed matrix behind it wants."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.shard_worker.model.kernels.machine import DTYPE, device

pytestmark = pytest.mark.gpu

ROWS, HEADS, EPS = 3, 4, 1e-6


@pytest.mark.parametrize("dim", [32, 64, 128])
@torch.inference_mode()
def test_heads_are_normed_and_gated(dim: int) -> None:
    """An RMSNorm of each head times SiLU of its gate; the sums are those of the rounded result."""
    from shard_worker.model.kernels.codes import group_sums
    from shard_worker.model.kernels.deltanet import Shape, gate
    from shard_worker.model.kernels.matmul import SQUARES_WIDTH

    on, generator = device().torch_device, torch.Generator().manual_seed(dim)
    shape = Shape(key_heads=2, value_heads=HEADS, key_dim=dim, value_dim=dim, taps=4, layers=1)
    made, projected = (
        torch.randn(extents, generator=generator).to(on) for extents in ((ROWS, HEADS, dim), (ROWS, shape.width))
    )
    norm = torch.linspace(0.5, 1.5, dim, device=on)
    sums = torch.empty(ROWS, HEADS * dim // SQUARES_WIDTH, device=on)
    result = gate(shape, made, projected.to(DTYPE), norm, EPS, column_sums=sums)

    z = projected.to(DTYPE).float()[:, shape.channels : shape.channels + HEADS * dim].view(ROWS, HEADS, dim)
    expected = F.rms_norm(made, (dim,), norm, EPS) * F.silu(z)
    torch.testing.assert_close(result.float(), expected.flatten(1), rtol=1e-2, atol=1e-2)
    assert torch.equal(sums, group_sums(result, SQUARES_WIDTH))
