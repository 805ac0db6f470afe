"""Rotary position embedding (RoFormer, arXiv 2104.09864), rotate-half form: element d pairs with d + rotary_dim / 2."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from services.model.rope import DividedScaling, LinearScaling, Llama3Scaling, ProportionalScaling, Rope, YarnScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """How fast each pair of elements turns, and what it is multiplied by.

    frequencies: radians a position, float32 [rotary_dim / 2]. factor: what cos and sin are multiplied by.
    """

    frequencies: torch.Tensor
    factor: float = 1.0

    @classmethod
    def of(cls, rope: Rope, device: torch.device) -> Rotation:
        """Return the rotation of a model: `theta^(-2j / rotary_dim)` for j < rotary_dim / 2, and scaled as it says."""
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
        frequencies = 1.0 / (rope.theta**exponents)
        factor = 1.0
        match rope.scaling:
            case LinearScaling():
                frequencies = frequencies / rope.scaling.factor
            case ProportionalScaling():
                frequencies = frequencies / rope.scaling.factor
                frequencies[rope.scaling.pairs :] = 0.0
            case DividedScaling():
                frequencies = frequencies / torch.tensor(rope.scaling.divisors)
            case Llama3Scaling():
                frequencies = _blended_by_wavelength(frequencies, rope.scaling)
            case YarnScaling():
                frequencies = _blended_by_pair(frequencies, rope, rope.scaling)
                factor = rope.scaling.attention_factor
        return cls(frequencies.to(device), factor)

    @classmethod
    def of_all(cls, ropes: Iterable[Rope], device: torch.device) -> dict[Rope, Rotation]:
        """Return the rotation of each."""
        return {rope: cls.of(rope, device) for rope in ropes}


def rope_table(positions: torch.Tensor, rotation: Rotation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and signed sin for rows at `positions` [n]: two [n, 1, rotary_dim] tensors of `dtype`.

    The first half of sin is negative, so that `apply_rope` needs one swap of halves and no negation.
    """
    angles = positions.float()[:, None, None] * rotation.frequencies
    cos, sin = angles.cos() * rotation.factor, angles.sin() * rotation.factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first rotary_dim elements of each head of x [n, heads, head_dim]; the others pass through.

    table: from `rope_table`.
    """
    cos, sin = table
    width, passing = cos.shape[-1], x.shape[-1] - cos.shape[-1]
    part = x.narrow(-1, 0, width) if passing else x
    rotated = torch.addcmul(part * cos, part.roll(width // 2, -1), sin)
    return torch.cat((rotated, x.narrow(-1, width, passing)), -1) if passing else rotated


def _blended_by_wavelength(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scale frequencies as `Llama3Scaling` says."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _blended_by_pair(frequencies: torch.Tensor, rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    """Scale frequencies as `YarnScaling` says."""

    def pair_of(turns: float) -> float:
        """Return at which pair, counted in fractions, so many turns fit into the original context."""
        longest = math.log(scaling.original_length / (turns * 2 * math.pi))
        return rope.rotary_dim * longest / (2 * math.log(rope.theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    # Never a division by 0.
    width = last - first or 0.001
    divided = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
