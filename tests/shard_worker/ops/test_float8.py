"""Eight bits and back against their definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shard_worker.ops.float8 import FLOAT8, narrowed, widened
from tests.reference import float8

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def assert_nearest(x: torch.Tensor) -> None:
    assert narrowed(x).view(torch.uint8).numpy().tolist() == float8.nearest(x.double().numpy()).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_becomes_the_nearest(dtype: torch.dtype) -> None:
    """All of them but NaN: subnormals, ties and both zeros too; what lies beyond 448, infinities too, becomes 448."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    every = every[~every.isnan()]

    assert len(every) > 63000
    assert_nearest(every)
    assert narrowed(torch.tensor([448.0, 470.0, 9e9, -torch.inf], dtype=dtype)).float().tolist() == [
        448,
        448,
        448,
        -448,
    ]


def test_numbers_of_32_bits_become_the_nearest() -> None:
    """Random ones of all sizes, and what lies on and right beside the middle between two neighbours."""
    middles = (float8.SIZES[:-1] + float8.SIZES[1:]) / 2
    assert np.array_equal(middles, middles.astype(np.float32))
    beside = [np.nextafter(middles.astype(np.float32), np.float32(side)) for side in (0, np.inf)]
    sizes = np.concatenate([middles.astype(np.float32), *beside, float8.SIZES.astype(np.float32)])
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(20000, generator=generator) * 2.0 ** (torch.rand(20000, generator=generator) * 24 - 14)

    assert_nearest(torch.from_numpy(np.concatenate([sizes, -sizes])))
    assert_nearest(spread)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_finite_code_comes_back_as_what_it_means(dtype: torch.dtype) -> None:
    """In any of the weights' types, and where bytes don't lie side by side."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 127) != 127]
    told = torch.tensor([float8.value(int(code)) for code in finite], dtype=torch.float64)

    apart = torch.stack((finite, finite.flip(0)), 1)[:, 0]
    for held in (finite, apart):
        wide = widened(held.view(FLOAT8), dtype)
        assert wide.dtype is dtype
        assert torch.equal(wide.double(), told)
        assert torch.equal(wide.signbit(), told.signbit() | (finite == 128))
