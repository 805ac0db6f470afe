"""Gated DeltaNet: the linear layers of the target.

Whole sequences are computed in chunks with plain matrix products, which any compiler and any
device can differentiate; single tokens update the state in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import GatedNorm
from shapes import TargetShape

CHUNK = 64
INVERSE_BASE = 8


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular matrices.

    Halving keeps the intermediate values small; only blocks of a few rows use the power series,
    whose terms would cancel catastrophically for long runs of equal keys.
    """
    size = lower.shape[-1]
    if size <= INVERSE_BASE:
        eye = torch.eye(size, device=lower.device, dtype=lower.dtype)
        power, inverse = -lower, eye - lower
        for _ in range(max(0, (size - 1).bit_length() - 1)):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse
    half = size // 2
    corners = torch.stack((lower[..., :half, :half], lower[..., half:, half:]))
    top, bottom = unit_lower_inverse(corners).unbind(0)
    left = -(bottom @ lower[..., half:, :half] @ top)
    upper = torch.cat((top, torch.zeros_like(top)), -1)
    return torch.cat((upper, torch.cat((left, bottom), -1)), -2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from an empty state; q, k, v [B, heads, T, D], decay (log) and beta [.., T].

    All of a chunk's work except one product per chunk, the state's recurrence, is done for all
    chunks at once: S_next = M S + N with M and N known beforehand.
    """
    length = q.shape[2]
    pad = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (decay, beta))
    total = decay.cumsum(-1)
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (total[..., :, None] - total[..., None, :]).masked_fill(~below, float("-inf")).exp()
    system = (beta[..., None] * (k @ k.mT) * pair).tril(-1)
    inverse = unit_lower_inverse(system) * beta[..., None, :]
    fresh = inverse @ v
    erased = inverse @ (k * total.exp()[..., None])
    last = total[..., -1:]
    kept = (k * (last - total).exp()[..., None]).mT
    eye = torch.eye(q.shape[-1], device=q.device, dtype=q.dtype)
    carry = last.exp()[..., None] * eye - kept @ erased
    gain = kept @ fresh
    state = torch.zeros_like(gain[:, :, 0])
    states = []
    for index in range(gain.shape[2]):
        states.append(state)
        state = carry[:, :, index] @ state + gain[:, :, index]
    before = torch.stack(states, 2)
    values = fresh - erased @ before
    out = (q * total.exp()[..., None]) @ before + ((q @ k.mT) * pair) @ values
    return out.flatten(2, 3)[:, :, :length]


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class LinearMixer(nn.Module):
    """Gated DeltaNet."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.key_heads, self.heads = shape.linear_num_key_heads, shape.linear_num_value_heads
        self.dim, self.taps = shape.linear_head_dim, shape.linear_conv_kernel_dim
        self.keys, self.values = self.key_heads * self.dim, self.heads * self.dim
        self.mixed = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(shape.hidden_size, self.mixed, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, self.values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, self.heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, self.heads, bias=False)
        self.conv1d = nn.Conv1d(self.mixed, self.mixed, self.taps, groups=self.mixed, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        # softplus(dt_bias) is the step of an untrained layer, spread from slow to fast forgetting.
        step = torch.empty(self.heads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(self.dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, shape.hidden_size, bias=False)

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [.., heads, dim] in float32; each key head serves consecutive value heads."""
        q, k, v = mixed.float().split((self.keys, self.keys, self.values), -1)
        repeat = self.heads // self.key_heads
        q, k = (unit(x.unflatten(-1, (self.key_heads, self.dim))).repeat_interleave(repeat, -2) for x in (q, k))
        return q * self.dim**-0.5, k, v.unflatten(-1, (self.heads, self.dim))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * step, self.in_proj_b(x).float().sigmoid()

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        gate = self.in_proj_z(x).unflatten(-1, (self.heads, self.dim))
        return self.out_proj(self.norm(mixed.to(x.dtype), gate).flatten(-2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        taps = self.conv1d.weight[:, 0]
        padded = F.pad(self.in_proj_qkv(x), (0, 0, self.taps - 1, 0))
        mixed = torch.zeros_like(padded[:, : x.shape[1]])
        for tap in range(self.taps):
            mixed = mixed + padded[:, tap : tap + x.shape[1]] * taps[:, tap].to(padded.dtype)
        q, k, v = (part.transpose(1, 2) for part in self.split(F.silu(mixed)))
        decay, beta = (part.transpose(1, 2) for part in self.gates(x))
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q, k, v, decay, beta)
        return self.finish(x, out.transpose(1, 2))

    def cache(self, rows: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.zeros(rows, self.heads, self.dim, self.dim, device=like.device)
        return like.new_zeros(rows, self.taps - 1, self.mixed), state

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
        columns, state = cache
        window = torch.cat((columns, self.in_proj_qkv(x)[:, None]), 1)
        columns.copy_(window[:, 1:])
        q, k, v = self.split(F.silu((window * self.conv1d.weight[:, 0].T).sum(1)))
        decay, beta = self.gates(x)
        faded = state * decay.exp()[..., None, None]
        update = beta[..., None] * (v - (faded * k[..., None]).sum(-2))
        grown = faded + k[..., None] * update[..., None, :]
        state.copy_(grown)
        return self.finish(x, (grown * q[..., None]).sum(-2))
