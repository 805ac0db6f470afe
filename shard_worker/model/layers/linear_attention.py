"""The Gated DeltaNet mixer (arXiv 2412.06464): one projection, causal convolution, gated delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from services.model.config import LinearAttentionConfig, ModelConfig
from services.model.layers.linear_attention import sizes
from shard_worker.cache import recurrent_cache
from shard_worker.model.layer_weights import LayerTensors, LinearAttentionWeights
from shard_worker.model.rows import AlikeSessions, Rows
from shard_worker.ops import deltanet
from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import Weight, concatenate

L2_EPS = 1e-6
"""What the L2 norm of queries and keys adds to the sum of squares."""


def pack(config: ModelConfig, layer: int, tensors: LayerTensors) -> LinearAttentionWeights:
    """Return the weights with one projection for queries, keys, values, gates, betas and decays."""
    shape = sizes(config)

    matrices, vectors = tensors.matrices, tensors.vectors

    def parts(grouped: bool, together: str, apart: Sequence[str], order: torch.Tensor) -> list[Weight]:
        if not grouped:
            return [matrices[f"linear_attn.in_proj_{part}.weight"] for part in apart]
        matrix = matrices[f"linear_attn.in_proj_{together}.weight"]
        return [matrix.select_rows(order.to(matrix.device))]

    wide, narrow = _ungrouped(shape)
    projection = concatenate(
        parts(shape.qkvz_grouped, "qkvz", ("qkv", "z"), wide) + parts(shape.ba_grouped, "ba", ("b", "a"), narrow)
    )
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
    slot: int,
    x: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """Return what rows x [n, hidden] become, [n, hidden].

    Uncommitted rows leave the state as it is and are recorded for a later commit.
    """
    shape = sizes(config)
    projected = weights.projection.matmul(x, None, rows.batch_invariant_rows)

    def mixed(sessions: AlikeSessions, own: torch.Tensor) -> torch.Tensor:
        return _mix(shape, weights, own, sessions, slot, config.norm_eps, rows)

    gated = rows.by_likeness(mixed, projected)
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
    sessions: AlikeSessions,
    slot: int,
    eps: float,
    rows: Rows,
) -> torch.Tensor:
    """Return what lies between the two projections for the rows [n, …] of sessions: [n, value_heads * value_dim]."""
    caches = [one.recurrent for one in sessions.caches if one.recurrent is not None]
    prefill = rows.operations.recurrent_prefill
    if prefill is not None and not sessions.uncommitted:
        made = []
        for cache, own in zip(caches, projected.chunk(len(caches)), strict=True):
            made.append(prefill(shape, weights, own, cache, slot, eps))
            cache.advance_inputs(slot, own[:, : shape.conv_channels])
        return made[0] if len(made) == 1 else torch.cat(made)

    heads, count = shape.value_heads, sessions.count
    mix, z, b, a = projected.split_with_sizes((shape.conv_channels, shape.value_dim, heads, heads), -1)
    window = recurrent_cache.window(caches, slot, mix.view(len(caches), count, -1), sessions.uncommitted)
    mixed = rows.each(F.silu, deltanet.causal_conv(window, weights.taps).flatten(0, 1))
    q, k, v = _heads(shape, mixed, weights.qk_scale, count)
    beta = _by_head(rows.each(torch.sigmoid, b.float()), count)
    log_decay = weights.decay_rate * rows.each(F.softplus, a.float() + weights.dt_bias)

    state = recurrent_cache.states(caches, slot)
    if sessions.uncommitted:
        if rows.batch_invariant_rows is None:
            out, corrected, decays = deltanet.block(state, q, k, v, _by_head(log_decay, count), beta)
        else:
            decays = _by_head(rows.each(torch.exp, log_decay), count)
            out, corrected = deltanet.block_by_steps(state, q, k, v, decays, beta)
        recorded = [tensor.chunk(len(caches)) for tensor in (k, corrected, decays)]
        for cache, *parts in zip(caches, *recorded, strict=True):
            cache.record(slot, *parts)
    else:
        if count == 1:
            out, _ = deltanet.step(state, q, k, v, _by_head(rows.each(torch.exp, log_decay), count), beta)
        else:
            out = deltanet.prefill(state, q, k, v, _by_head(log_decay, count), beta)
        recurrent_cache.put_states(caches, slot, state)

    normed = rms_norm(out.view(-1, heads, *out.shape[1:]).transpose(1, 2), weights.norm, eps)
    return (normed.flatten(0, 1) * rows.each(F.silu, z.float()).view(-1, heads, shape.value_head_dim)).flatten(1)


def _by_head(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return numbers of rows [n, heads], `count` rows of each session, as [sessions * heads, count]."""
    return tensor.view(-1, count, tensor.shape[1]).transpose(1, 2).flatten(0, 1)


def _heads(
    shape: LinearAttentionConfig, mixed: torch.Tensor, qk_scale: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the q, k (both normed) and v of mixed rows, float32 [n, channels], `count` of each session: each
    [sessions * value_heads, count, dim]."""
    dim = shape.key_head_dim
    qk = mixed[:, : 2 * shape.key_dim].view(len(mixed), 2 * shape.key_heads, dim)
    # sum(x²) + eps, the L2 norm's, is mean(x²) + eps / dim, the RMSNorm's, times dim.
    qk = rms_norm(qk, qk_scale, L2_EPS / dim).view(-1, count, 2, shape.key_heads, 1, dim)
    # Each key head serves consecutive value heads.
    qk = qk.expand(-1, -1, -1, -1, shape.value_heads // shape.key_heads, -1)
    q, k = qk.permute(2, 0, 3, 4, 1, 5).reshape(2, -1, count, dim)
    v = mixed[:, 2 * shape.key_dim :].view(-1, count, shape.value_heads, shape.value_head_dim)
    return q, k, v.transpose(1, 2).flatten(0, 1)
