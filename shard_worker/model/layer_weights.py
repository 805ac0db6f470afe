"""The weights of one decoder layer as its sublayers and kernels take them: fused, converted, on their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.model.config import LayerKind, ModelConfig
from shard_worker.weights.weight import DenseWeight, Weight


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer's tensors on their device, by the names of `services.model.layers.layer_shapes`.

    matrices: those that rows are multiplied by. vectors: all others, the convolution's taps included.
    """

    matrices: Mapping[str, Weight]
    vectors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> LayerTensors:
        """Return dense tensors sorted by what they are."""
        return cls(
            {name: DenseWeight(tensor) for name, tensor in tensors.items() if tensor.dim() == 2},
            {name: tensor for name, tensor in tensors.items() if tensor.dim() != 2},
        )


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: rows [queries | keys | values | gates], each head after head; the gates only where the family has them.

    qk_norm: float32 [heads + kv_heads, head_dim], so that queries and keys are normed in one call.
    """

    qkv: Weight
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor
    out: Weight
    out_bias: torch.Tensor | None
    gated: bool


@dataclass(frozen=True, slots=True)
class LinearAttentionWeights:
    """projection: rows [q, k, v | z | b | a]. taps: float32 [t, channels]. decay_rate: `-exp(A_log)`.

    qk_scale: float32 [2 * key_heads, 1], what makes an RMSNorm of a key an L2 norm, with the query's 1/sqrt(dim) on
    top.
    """

    projection: Weight
    taps: torch.Tensor
    qk_scale: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: Weight


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up: [2 * mlp, hidden], gate rows first; down: [hidden, mlp]."""

    gate_up: Weight
    down: Weight


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
