"""Products of a few rows against dense ones, and of a row alone against the same row among others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device, seldom

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, EPS = 80, 2048, 1e-6
"""So deep that several programs share a tile."""


CASES = [
    *((kind, rows) for kind in ("added", "paired") for rows in (16, 17, 64, *((128, 200, 256, 512) if ON_GPU else ()))),
    *(("gelu", rows) for rows in ((16, 512) if ON_GPU else (16,))),
]


@pytest.mark.parametrize(
    ("kind", "rows", "dtype"),
    [
        (seldom if rows == 64 and (kind, dtype) != ("paired", torch.float32) else pytest.param)(kind, rows, dtype)
        for dtype in (DTYPE, torch.float32)
        for kind, rows in CASES
    ],
)
@torch.inference_mode()
def test_a_product_is_the_same_alone_and_among_others(kind: str, rows: int, dtype: torch.dtype) -> None:
    """With a residual and the norm that follows, with SwiGLU or GeGLU: near the dense one, and to the same bits."""
    from shard_worker.device.devices import kernel_target
    from shard_worker.model.kernels.matmul import linear
    from shard_worker.model.kernels.product_cuts import choose

    on, generator = device().torch_device, torch.Generator().manual_seed(rows)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(on, dtype)

    paired, gelu = kind != "added", kind == "gelu"
    assert choose(WIDTH, DEPTH, paired, None, dtype.itemsize, kernel_target(on)).split > 1
    x, weight = random(rows, DEPTH), random(WIDTH * (2 if paired else 1), DEPTH, scale=DEPTH**-0.5)
    residual, norm = (None, None) if paired else (random(rows, WIDTH), torch.rand(WIDTH, device=on) + 0.5)
    together, behind = linear(x, weight, paired=paired, gelu=gelu, residual=residual, norm=norm, eps=EPS)

    product = F.linear(x.double(), weight.double())
    if residual is None:
        gate, up = product.chunk(2, -1)
        expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    else:
        expected = product + residual.double()
    near = 1e-5 if dtype is torch.float32 else 1e-2
    assert (together.double() - expected).norm() < near * expected.norm()
    if behind is not None:
        squares = behind.squares.sum(1).double()
        assert (squares - expected.square().sum(-1)).norm() < near * squares.norm()
    if ON_GPU:
        for row in range(rows):
            own = None if residual is None else residual[row : row + 1]
            one, after = linear(x[row : row + 1], weight, paired=paired, gelu=gelu, residual=own, norm=norm, eps=EPS)
            assert torch.equal(one[0], together[row])
            if after is not None and behind is not None:
                assert torch.equal(after.squares[0], behind.squares[row])
                assert torch.equal(after.scaled[0], behind.scaled[row])
