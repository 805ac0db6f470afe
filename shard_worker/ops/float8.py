"""Numbers in eight bits (e4m3fn: 4 of exponent, 3 of mantissa, up to 448) and back.

Kernels do the same by the device's own instructions: to the nearest, ties to even, and no further than 448.
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0

_UNSHIFTED = ~0x7800
"""Of 16 bits: without the upper four of bfloat16's exponent, into which the sign was drawn."""

_REBIASED = 2.0**120
"""bfloat16's exponents count from -127, e4m3fn's from -7."""


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers in eight bits; beyond the largest, that one: a cast alone makes NaN of them."""
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite numbers of eight bits in a type that holds them all: any of the weights'."""
    if x.device.type != "cpu":
        return x.to(dtype)
    # torch converts one number after the other there: 4096 keys and values of 256 take 29 ms, and so 1.
    bits = (x.view(torch.int8).to(torch.int16) << 4).bitwise_and_(_UNSHIFTED).view(torch.bfloat16)
    return bits.to(torch.float32).mul_(_REBIASED).to(dtype) if dtype is not torch.bfloat16 else bits.mul_(_REBIASED)
