"""The Gated DeltaNet mixer (arXiv 2412.06464): one projection, causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from services.model.config import LayerKind, LinearAttentionConfig, ModelConfig
from services.model.layers.linear_attention import sizes
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.model.layer_weights import LayerTensors, LinearAttentionWeights
from shard_worker.model.rows import Rows, SessionRows
from shard_worker.ops import deltanet
from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import concatenate

L2_EPS = 1e-6
"""What the L2 norm of queries and keys adds to the sum of squares."""


def pack(config: ModelConfig, tensors: LayerTensors) -> LinearAttentionWeights:
    """Return the weights with one projection for queries, keys, values, gates, betas and decays."""
    shape = sizes(config)

    matrices, vectors = tensors.matrices, tensors.vectors
    parts = ("qkvz", "ba") if shape.grouped else ("qkv", "z", "b", "a")
    projections = [matrices[f"linear_attn.in_proj_{part}.weight"] for part in parts]
    if shape.grouped:
        orders = _ungrouped(shape)
        projections = [
            matrix.select_rows(order.to(matrix.device)) for matrix, order in zip(projections, orders, strict=True)
        ]
    projection = concatenate(projections)
    scale = torch.full((2 * shape.key_heads, 1), shape.key_head_dim**-0.5)
    scale[: shape.key_heads] *= shape.key_head_dim**-0.5
    return LinearAttentionWeights(
        projection=projection.prepared(),
        taps=vectors["linear_attn.conv1d.weight"].squeeze(1).t().float().contiguous(),
        qk_scale=scale.to(projection.device),
        decay_rate=-vectors["linear_attn.A_log"].float().exp(),
        dt_bias=vectors["linear_attn.dt_bias"].float(),
        norm=vectors["linear_attn.norm.weight"].float(),
        out=matrices["linear_attn.out_proj.weight"].prepared(),
    )


def run(
    config: ModelConfig,
    weights: LinearAttentionWeights,
    kind: LayerKind,
    slot: int,
    x: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """Return what rows x [n, hidden] become, [n, hidden].

    Uncommitted rows leave the state as it is and are recorded for a later commit.
    """
    shape = sizes(config)
    projected = weights.projection.matmul(x, None, rows.batch_invariant_rows)

    def mixed(session: SessionRows, own: slice) -> torch.Tensor:
        assert session.caches.recurrent is not None
        return _mix(shape, weights, projected[own], session.caches.recurrent, slot, config.norm_eps, rows)

    gated = rows.by_session(mixed)
    return weights.out.matmul(gated.to(x.dtype), None, rows.batch_invariant_rows)


def _ungrouped(shape: LinearAttentionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows of projections that are grouped by key head make queries, keys, values and gates, and which
    betas and decays, in the order of `LinearAttentionWeights.projection`."""
    share = shape.value_heads // shape.key_heads
    sizes = (shape.key_head_dim, shape.key_head_dim, share * shape.value_head_dim, share * shape.value_head_dim)
    wide = torch.arange(shape.key_heads * sum(sizes)).view(shape.key_heads, -1).split_with_sizes(sizes, 1)
    narrow = torch.arange(2 * shape.value_heads).view(shape.key_heads, -1).split_with_sizes((share, share), 1)
    return torch.cat([part.flatten() for part in wide]), torch.cat([part.flatten() for part in narrow])


def _mix(
    shape: LinearAttentionConfig,
    weights: LinearAttentionWeights,
    projected: torch.Tensor,
    cache: RecurrentCache,
    slot: int,
    eps: float,
    rows: Rows,
) -> torch.Tensor:
    """Return what lies between the two projections for one session's rows [n, …]: [n, value_heads * value_dim]."""
    count, heads = len(projected), shape.value_heads
    mix, z, b, a = projected.split_with_sizes((shape.conv_channels, shape.value_dim, heads, heads), -1)
    prefill = rows.operations.recurrent_prefill
    if prefill is not None and not rows.uncommitted:
        gated = prefill(shape, weights, projected, cache, slot, eps)
        cache.advance_inputs(slot, mix)
        return gated
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

    normed = rms_norm(out.transpose(0, 1), weights.norm, eps)
    return (normed * rows.each(F.silu, z.float()).view(count, heads, -1)).view(count, -1)


def _heads(
    shape: LinearAttentionConfig, mixed: torch.Tensor, qk_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the q, k (both normed) and v of mixed rows, float32 [n, channels]: each [value_heads, n, dim]."""
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
