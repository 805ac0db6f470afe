"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x * rsqrt(mean(x², last axis) + eps) * weight` (arXiv 1910.07467), computed in float32, in x's dtype.

    x: [..., d]. weight: float32, broadcast against the last axes of x, so that one call may serve several heads with
    weights of their own.
    """
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    return normed.mul_(weight).to(x.dtype)
