"""Parts that the target and the draft share: norms, rotary positions, the gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class CenteredNorm(nn.Module):
    """RMSNorm whose stored weight is the distance from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1 + self.weight.float(), self.eps)


class GatedNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (rms_norm(x, self.weight, self.eps) * F.silu(gate.float())).to(x.dtype)


def rotary(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [.., size] of the rotate-half convention."""
    frequencies = theta ** (-torch.arange(0, size, 2, device=positions.device).float() / size)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dimensions of every head; cos and sin broadcast against x."""
    size = cos.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    half = torch.cat((-turned[..., size // 2 :], turned[..., : size // 2]), -1)
    return torch.cat(((turned * cos + half * sin).to(x.dtype), rest), -1)


class Mlp(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
