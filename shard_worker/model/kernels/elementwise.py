"""What lies between the products of many rows, each in one pass over memory: RMSNorm, and the middle of SwiGLU and
GeGLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _norm(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    result = wide * factor * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Return float32 `silu(gate) * up`. GELU: that in tanh's form in place of SiLU."""
    if GELU:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        result = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result


@triton.jit
def _gate(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gated(gate, up, GELU).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of rows x [n, width] with weight, float32 [width]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    _norm[(rows,)](x, weight, out, width, eps, BLOCK=triton.next_power_of_2(width), num_warps=8)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(first half) * second half`, [n, width], of rows [n, 2 * width]."""
    return _gated_halves(gate_up, gelu=False)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(first half) * second half` in tanh's form, of rows as `swiglu` takes them."""
    return _gated_halves(gate_up, gelu=True)


def _gated_halves(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _gate[(rows, triton.cdiv(width, _COLUMNS))](gate_up, out, width, GELU=gelu, BLOCK=_COLUMNS, num_warps=4)
    return out
