"""A decoder layer as most families have it: norm, mixer, residual, norm, SwiGLU, residual."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.model.config import ModelConfig
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.layer_weights import DecoderWeights, LinearAttentionWeights
from shard_worker.model.layers import attention, linear_attention, mlp
from shard_worker.model.rows import Rows
from shard_worker.ops.norm import rms_norm


def run(
    config: ModelConfig,
    weights: DecoderWeights,
    slot: int,
    hidden: torch.Tensor,
    rows: Rows,
    caches: SegmentCaches,
) -> torch.Tensor:
    """One layer on hidden [n, hidden_size]."""
    norm = _norm(rows)
    normed = norm(hidden, weights.input_norm, config.norm_eps)
    if isinstance(weights.mixer, LinearAttentionWeights):
        mixed = linear_attention.run(config, weights.mixer, slot, normed, rows, caches)
    else:
        mixed = attention.run(config, weights.mixer, weights.kind, slot, normed, rows, caches)
    hidden = hidden + mixed
    normed = norm(hidden, weights.post_norm, config.norm_eps)
    return hidden + mlp.run(weights.mlp, normed, rows)


def _norm(rows: Rows) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    if not rows.kernels:
        return rms_norm
    from shard_worker.model.kernels import elementwise

    return elementwise.rms_norm
