"""Root-mean-square normalisation."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from shard_worker.cpu_kernels import norm as cpu_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x * rsqrt(mean(x², last axis) + eps) * weight` (arXiv 1910.07467), computed in float32, in x's dtype.

    x: [..., d]. weight: float32, broadcast against the last axes of x, so that one call may serve several heads with
    weights of their own.
    """
    if cpu_norm.takes(x, weight):
        return cpu_norm.rms_norm(x, weight, eps)
    wide = x.float()
    if wide.device.type == "cpu":
        # Torch's own function is made of twice as many operators there, which take longer than what they compute.
        length = torch.linalg.vector_norm(wide, 2, -1, True)
        normed = wide * torch.addcmul(_number(eps), length, length, value=1.0 / x.shape[-1]).rsqrt_()
    else:
        normed = F.rms_norm(wide, x.shape[-1:], None, eps)
    return normed.mul_(weight).to(x.dtype)


@functools.cache
def _number(number: float) -> torch.Tensor:
    """Return a number as a tensor on the CPU."""
    return torch.tensor(number)
