"""RMSNorm against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from shard_worker.ops.norm import rms_norm


@pytest.mark.parametrize("weight_shape", [(8,), (3, 8), (3, 1)])
def test_norm_is_its_formula(weight_shape: tuple[int, ...]) -> None:
    """x * rsqrt(mean(x²) + eps) * weight over the last axis, the weight one for all or one for each head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator)
    weight = torch.randn(weight_shape, generator=generator)

    own = rms_norm(x, weight, 1e-2)

    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-2) * weight.double()
    torch.testing.assert_close(own.double(), expected, rtol=0, atol=1e-6)


def test_norm_computes_in_float32_and_answers_in_the_dtype_of_its_input() -> None:
    """A bfloat16 row is normed as its float32 copy is, and rounded once at the end; the input stays as it was."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, weight = x.clone(), torch.full((8,), 1.7)

    own = rms_norm(x, weight, 1e-6)

    assert own.dtype == torch.bfloat16
    assert torch.equal(own, rms_norm(x.float(), weight, 1e-6).bfloat16())
    assert torch.equal(x, before)


def test_a_row_of_zeros_stays_zero() -> None:
    """eps keeps a zero row, and one that is nearly zero, finite."""
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))
    assert rms_norm(torch.full((1, 8), 1e-30), torch.ones(8), 1e-6).isfinite().all()
