"""Functions between two products of a feed-forward part."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` (arXiv 2002.05202) of rows [n, 2 * width], gates first: [n, width]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
