"""Gated DeltaNet sublayer: one fused projection, causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from services.model.config import LayerKind, LinearAttentionConfig, ModelConfig
from services.model.layers.linear_attention import sizes
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.layer_weights import LinearAttentionWeights
from shard_worker.model.rows import Rows
from shard_worker.ops import deltanet
from shard_worker.ops.linear import linear, packed
from shard_worker.ops.norm import rms_norm

L2_EPS = 1e-6


def pack(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> LinearAttentionWeights:
    """Return the weights with one projection for queries, keys, values, gates, betas and decays."""
    shape = sizes(config)

    def take(name: str) -> torch.Tensor:
        return tensors[f"linear_attn.{name}"]

    scale = torch.full((2 * shape.key_heads, 1), shape.key_head_dim**-0.5)
    scale[: shape.key_heads] *= shape.key_head_dim**-0.5
    parts = [take(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")]
    return LinearAttentionWeights(
        projection=packed(torch.cat(parts)),
        taps=take("conv1d.weight").squeeze(1).t().float().contiguous(),
        qk_scale=scale.to(parts[0].device),
        decay_rate=-take("A_log").float().exp(),
        dt_bias=take("dt_bias").float(),
        norm=take("norm.weight").float(),
        out=packed(take("out_proj.weight")),
    )


def run(
    config: ModelConfig,
    weights: LinearAttentionWeights,
    kind: LayerKind,
    slot: int,
    x: torch.Tensor,
    rows: Rows,
    caches: SegmentCaches,
) -> torch.Tensor:
    """x: [n, hidden] -> [n, hidden]. Deferred rows leave the state as it is and are recorded for a later commit."""
    shape, cache = sizes(config), caches.recurrent
    assert cache is not None
    count, heads = x.shape[0], shape.value_heads
    widths = (shape.conv_channels, shape.value_dim, heads, heads)
    projected = linear(x, weights.projection, None, rows.batch_invariant_rows)
    mix, z, b, a = projected.split_with_sizes(widths, -1)
    if rows.delta_kernels and not rows.uncommitted:
        from shard_worker.model.kernels import delta_prefill

        gated = delta_prefill.run_layer(shape, weights, projected, cache, slot, config.norm_eps)
        cache.advance_inputs(slot, mix)
        return linear(gated, weights.out)
    mixed = rows.each(F.silu, deltanet.causal_conv(cache.window(slot, mix, rows.uncommitted), weights.taps))
    q, k, v = _heads(shape, mixed, weights.qk_scale)
    beta = rows.each(torch.sigmoid, b.float()).t()
    log_decay = (weights.decay_rate * rows.each(F.softplus, a.float() + weights.dt_bias)).t()

    state = cache.state[slot]
    if rows.uncommitted:
        block = deltanet.block if rows.batch_invariant_rows is None else deltanet.block_by_steps
        out, corrected, decays = block(state, q, k, v, log_decay, beta)
        cache.record(slot, k, corrected, decays)
    elif count == 1:
        out, _, _ = deltanet.step(state, q, k, v, log_decay, beta)
    else:
        out = deltanet.prefill(state, q, k, v, log_decay, beta)

    normed = rms_norm(out.transpose(0, 1), weights.norm, config.norm_eps)
    gated = normed * rows.each(F.silu, z.float()).view(count, heads, -1)
    return linear(gated.to(x.dtype).view(count, -1), weights.out, None, rows.batch_invariant_rows)


def _heads(
    shape: LinearAttentionConfig, mixed: torch.Tensor, qk_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split float32 [n, channels] into normed q, k and v, each [value_heads, n, dim]."""
    count, dim = mixed.shape[0], shape.key_head_dim
    qk = mixed[:, : 2 * shape.key_dim].view(count, 2 * shape.key_heads, dim)
    # sum(x²) + eps, the L2 norm's, is mean(x²) + eps / dim, the RMSNorm's, times dim.
    qk = rms_norm(qk, qk_scale, L2_EPS / dim)
    v = mixed[:, 2 * shape.key_dim :].view(count, shape.value_heads, -1).transpose(0, 1)
    share = shape.value_heads // shape.key_heads
    if share > 1:
        # Each key head serves consecutive value heads.
        qk = qk[:, :, None].expand(-1, -1, share, -1).reshape(count, -1, dim)
    q, k = qk.transpose(0, 1).chunk(2)
    return q, k, v
