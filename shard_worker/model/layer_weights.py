"""The weights of one decoder layer as its sublayers and kernels take them: fused, converted, on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.model.config import LayerKind, ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: rows [queries | keys | values | gates], each head after head; the gates only where the family has them.

    qk_norm: float32 [heads + kv_heads, head_dim], so that queries and keys are normed in one call.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gated: bool


@dataclass(frozen=True, slots=True)
class LinearAttentionWeights:
    """projection: rows [q, k, v | z | b | a]. taps: float32 [t, channels]. decay_rate: `-exp(A_log)`.

    qk_scale: float32 [2 * key_heads, 1], what makes an RMSNorm of a key an L2 norm, with the query's 1/sqrt(dim) on
    top.
    """

    projection: torch.Tensor
    taps: torch.Tensor
    qk_scale: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up: [2 * mlp, hidden], gate rows first; down: [hidden, mlp]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One layer. kind: of an attention mixer; the norms are float32 [hidden]."""

    kind: LayerKind
    input_norm: torch.Tensor
    mixer: AttentionWeights | LinearAttentionWeights
    post_norm: torch.Tensor
    mlp: MlpWeights


def norm_factor(config: ModelConfig, stored: torch.Tensor) -> torch.Tensor:
    """Return what an RMSNorm multiplies by, float32, from its stored weight: the family may store it less 1."""
    return stored.float() + config.norm_offset if config.norm_offset else stored.float()
