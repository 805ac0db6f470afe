"""The kernel that makes elements of codes, against codes times scales in float64."""

from __future__ import annotations

from itertools import product as all_of

import pytest
import torch

from shard_worker.cpu_kernels import native
from shard_worker.cpu_kernels.unpacking import unpack
from tests.combinations import covering
from tests.shard_worker.cpu_kernels.test_codes_products import codes_of

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")

ROUNDED_BY = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""How far rounding an element moves it at most, relative to it."""


@pytest.mark.parametrize(
    ("bits", "group", "dtype", "threads"),
    covering(all_of((4, 8), (16, 32, 64, 256), ROUNDED_BY, (1, 3))),
    indirect=["threads"],
)
def test_every_code_is_its_scale_times_it(bits: int, group: int, dtype: torch.dtype, threads: int) -> None:
    """In its place, with its group's scale and offset, and rounded once."""
    torch.manual_seed(group)
    codes, whole = codes_of(37, 768, bits)
    numbers = torch.randn(37, 768 // group, 2).bfloat16()
    scales, offsets = numbers.double().repeat_interleave(group, 1).unbind(2)
    made, exact = unpack(codes, numbers, 768, dtype), whole * scales + offsets

    assert (made.shape, made.dtype) == (exact.shape, dtype)
    # What is nearly 0 was rounded before, to float32.
    most = exact.abs() * ROUNDED_BY[dtype] + (whole * scales).abs() * 2.0**-23
    assert bool(((made.double() - exact).abs() <= most).all())
