"""Numbers in eight bits (e4m3fn: 4 bits of exponent, 3 of mantissa, up to 448) and back.

Kernels do the same by the device's own instructions: they round to the nearest, ties to even, and no further than 448.
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the type."""

_UNSHIFTED = ~0x7800
"""A mask of 16 bits without the upper four of bfloat16's exponent, into which the sign was extended."""

_REBIASED = 2.0**120
"""The factor between the exponents' biases: bfloat16's count from -127, e4m3fn's from -7."""


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers in eight bits. Those beyond the largest become that, where a cast alone makes NaN."""
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return finite numbers of eight bits in a type that holds them all, which each of the weights' types does."""
    if x.device.type != "cpu":
        return x.to(dtype)
    # torch converts one number after the other there: 4096 keys and values of 256 take 29 ms, and so 1.
    bits = (x.view(torch.int8).to(torch.int16) << 4).bitwise_and_(_UNSHIFTED).view(torch.bfloat16)
    return bits.to(torch.float32).mul_(_REBIASED).to(dtype) if dtype is not torch.bfloat16 else bits.mul_(_REBIASED)
