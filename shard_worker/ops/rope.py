"""Rotary position embedding (RoFormer, arXiv 2104.09864), rotate-half form: element d pairs with d + rotary_dim / 2."""

from __future__ import annotations

import torch


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return `theta^(-2j / rotary_dim)` for j < rotary_dim / 2, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim
    return 1.0 / (theta**exponents)


def rope_table(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and signed sin for rows at `positions` [n]: two [n, 1, rotary_dim] tensors of `dtype`.

    The first half of sin is negative, so that `apply_rope` needs one swap of halves and no negation.
    """
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first rotary_dim elements of each head of x [n, heads, head_dim]; the others pass through.

    table: from `rope_table`.
    """
    cos, sin = table
    width = cos.shape[-1]
    part = x[..., :width]
    swapped = torch.cat((part[..., width // 2 :], part[..., : width // 2]), -1)
    rotated = torch.addcmul(part * cos, swapped, sin)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)
