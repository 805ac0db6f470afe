"""Functions between two products of a feed-forward part."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from services.model.config import Activation
from shard_worker.cpu_kernels import elementwise as cpu_elementwise


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` (arXiv 2002.05202) of rows [n, 2 * width], gates first: [n, width]."""
    if cpu_elementwise.takes(gate_up):
        return cpu_elementwise.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def clamped_swiglu(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Return `(up + 1) * gate * sigmoid(alpha * gate)` of rows as in `swiglu`: of gates cut off above `limit`, and ups
    cut off beyond it on both sides."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def gating(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an activation by itself, as gates are given it elsewhere."""
    return F.silu if activation is Activation.SILU else _gelu


def _gelu(gate: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh")


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up` (arXiv 2002.05202), with tanh's form of GELU, of rows as `swiglu` takes them."""
    gate, up = gate_up.chunk(2, -1)
    return _gelu(gate) * up
