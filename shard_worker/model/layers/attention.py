"""Attention sublayer: one fused projection, per-head q/k norms, RoPE, cache write, attention, optional output gate."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.model.config import LayerKind, ModelConfig
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.layer_weights import AttentionWeights, norm_factor
from shard_worker.model.rows import Rows
from shard_worker.ops.attention import attend, attend_each
from shard_worker.ops.linear import linear, packed
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import apply_rope


def pack(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> AttentionWeights:
    """Return the weights with one projection for queries, keys, values and gates."""

    def fuse(suffix: str) -> torch.Tensor | None:
        if f"self_attn.q_proj.{suffix}" not in tensors:
            return None
        q, k, v = (tensors[f"self_attn.{name}_proj.{suffix}"] for name in "qkv")
        if not config.attention_gate:
            return torch.cat((q, k, v))
        pairs = q.view(config.heads, 2, config.head_dim, *q.shape[1:])
        return torch.cat((pairs[:, 0].flatten(0, 1), k, v, pairs[:, 1].flatten(0, 1)))

    q_norm = norm_factor(config, tensors["self_attn.q_norm.weight"])
    k_norm = norm_factor(config, tensors["self_attn.k_norm.weight"])
    qkv = fuse("weight")
    assert qkv is not None
    return AttentionWeights(
        qkv=packed(qkv),
        qkv_bias=fuse("bias"),
        qk_norm=torch.cat((q_norm.expand(config.heads, -1), k_norm.expand(config.kv_heads, -1))).contiguous(),
        out=packed(tensors["self_attn.o_proj.weight"]),
        out_bias=tensors.get("self_attn.o_proj.bias"),
        gated=config.attention_gate,
    )


def run(
    config: ModelConfig,
    weights: AttentionWeights,
    kind: LayerKind,
    slot: int,
    x: torch.Tensor,
    rows: Rows,
    caches: SegmentCaches,
) -> torch.Tensor:
    """x: [n, hidden] -> [n, hidden]; keys and values of the rows are written to the cache first."""
    assert caches.attention is not None
    count, heads, kv_heads, head_dim = x.shape[0], config.heads, config.kv_heads, config.head_dim
    projected = linear(x, weights.qkv, weights.qkv_bias, rows.batch_invariant_rows).view(count, -1, head_dim)
    qk = rms_norm(projected[:, : heads + kv_heads], weights.qk_norm, config.norm_eps)
    qk = apply_rope(qk, rows.rope)
    values = projected[:, heads + kv_heads : heads + 2 * kv_heads]
    caches.attention.store(slot, rows.base, qk[:, heads:], values)
    keys_and_values = caches.attention.span(slot, rows.base + count)
    if rows.batch_invariant_rows is not None:
        window = config.sliding_window if kind is LayerKind.SLIDING else None
        mixed = attend_each(qk[:, :heads], *keys_and_values, window)
    else:
        mixed = attend(qk[:, :heads], *keys_and_values, rows.masks[kind])
    if weights.gated:
        mixed = mixed * rows.each(torch.sigmoid, projected[:, heads + 2 * kv_heads :].reshape(count, -1))
    return linear(mixed, weights.out, weights.out_bias, rows.batch_invariant_rows)
