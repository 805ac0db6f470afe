"""The attention mixer: one projection, maybe norms of queries and keys, RoPE, cache write, attention, maybe a gate."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from services.model.config import ModelConfig
from shard_worker.cache.segment_caches import KeyKind
from shard_worker.cpu_kernels import heads as cpu_heads
from shard_worker.model.layer_weights import AttentionWeights, LayerTensors, norm_factor
from shard_worker.model.rows import Rows, SessionRows
from shard_worker.ops.attention import attend, attend_each, attend_with_sinks, first_seen
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import apply_rope
from shard_worker.weights.weight import concatenate


def pack(config: ModelConfig, layer: int, tensors: LayerTensors) -> AttentionWeights:
    """Return the weights with one projection for queries, keys, values and gates."""
    shape = config.attention(layer)
    shares = config.keys_of(layer) != layer
    names = "q" if shares else "qk" if shape.keys_as_values else "qkv"
    parts = [tensors.matrices[f"self_attn.{name}_proj.weight"] for name in names]
    biases = [tensors.vectors[f"self_attn.{name}_proj.bias"] for name in names] if config.attention_bias else None
    if config.attention_gate:
        # For each head its query, then its gate.
        q, *others = parts
        rows = torch.arange(q.rows, device=q.device).view(shape.heads, 2, shape.head_dim)
        queries, gates = rows[:, 0].flatten(), rows[:, 1].flatten()
        parts = [q.select_rows(queries), *others, q.select_rows(gates)]
        if biases is not None:
            biases = [biases[0][queries], *biases[1:], biases[0][gates]]
    qk_norm = None
    if config.qk_norm:
        heads_of = {"q": shape.heads} if shares else {"q": shape.heads, "k": shape.kv_heads}
        norms = {part: norm_factor(config, tensors.vectors[f"self_attn.{part}_norm.weight"]) for part in heads_of}
        if shape.score_scale is not None:
            # `attend` divides by sqrt(head_dim).
            norms["q"] = norms["q"] * (shape.score_scale * shape.head_dim**0.5)
        qk_norm = torch.cat([norms[part].expand(count, -1) for part, count in heads_of.items()]).contiguous()
    return AttentionWeights(
        shape=shape,
        qkv=concatenate(parts).prepared(),
        qkv_bias=None if biases is None else torch.cat(biases),
        qk_norm=qk_norm,
        out=tensors.matrices["self_attn.o_proj.weight"].prepared(),
        out_bias=tensors.vectors.get("self_attn.o_proj.bias"),
        gated=config.attention_gate,
        head_gates=tensors.matrices["self_attn.g_proj.weight"].prepared() if config.gates_per_head else None,
        sinks=tensors.vectors["self_attn.sinks"].float() if config.attention_sinks else None,
        value_norm=torch.ones(shape.head_dim, device=parts[0].device) if shape.value_norm else None,
        shares=shares,
    )


def run(
    config: ModelConfig,
    weights: AttentionWeights,
    slot: int,
    x: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """Return what rows x [n, hidden] become, [n, hidden]. Their keys and values are written to the caches first."""
    shape, count = weights.shape, len(x)
    heads = shape.heads
    projected = weights.qkv.matmul(x, weights.qkv_bias, rows.batch_invariant_rows).view(count, -1, shape.head_dim)
    finished, pages = rows.operations.finished_heads, rows.pages.get(KeyKind.of(shape))
    if finished is not None and pages is not None:
        [only] = rows.sessions
        cache = only.caches.attention_of(shape)
        own = finished(weights, projected, rows.ropes[shape.rope], cache, pages, slot, config.norm_eps)
        queries, gates = own[:, :heads], own[:, heads:]
    else:
        queries, gates = _finish(config, weights, slot, projected, rows), projected[:, -heads:]

    def seen(session: SessionRows, own: slice) -> torch.Tensor:
        cache = session.caches.attention_of(shape)
        keys_and_values = cache.span(slot, first_seen(session.base, shape.window), session.base + session.count)
        alone = rows.batch_invariant_rows is not None
        if weights.sinks is not None:
            attend_so = partial(attend_with_sinks, alone=True) if alone else rows.operations.attend_with_sinks
            return attend_so(queries[own], *keys_and_values, weights.sinks, shape.window)
        if alone:
            return attend_each(queries[own], *keys_and_values, shape.window)
        return attend(queries[own], *keys_and_values, session.masks[shape])

    mixed = rows.by_session(seen)
    if weights.head_gates is not None:
        gates = weights.head_gates.matmul(x, None, rows.batch_invariant_rows).float()
        opened = rows.each(F.softplus, gates).to(mixed.dtype).view(count, heads, -1)
        mixed = (mixed.view(count, heads, -1) * opened).flatten(1)
    if weights.gated:
        mixed = mixed * rows.each(torch.sigmoid, gates.reshape(count, -1))
    return weights.out.matmul(mixed, weights.out_bias, rows.batch_invariant_rows)


def _finish(
    config: ModelConfig, weights: AttentionWeights, slot: int, projected: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Store the keys and values of projections [n, heads, head_dim], and return queries, [n, heads, head_dim]."""
    shape = weights.shape
    heads, kv_heads = shape.heads, shape.kv_heads
    first_value, table = heads if shape.keys_as_values else heads + kv_heads, rows.ropes[shape.rope]
    caches = [session.caches.attention_of(shape) for session in rows.sessions]
    if (
        weights.value_norm is None
        and not weights.shares
        and cpu_heads.takes(projected, weights.qk_norm, table, caches[0].dtype)
    ):
        queries, first = projected.new_empty((len(projected), heads, shape.head_dim)), 0
        for session, cache in zip(rows.sessions, caches, strict=True):
            for places, run in cache.places(slot, session.base, session.count):
                own = slice(first + run.start, first + run.stop)
                turns = table[0][own], table[1][own]
                norm, eps = weights.qk_norm, config.norm_eps
                cpu_heads.finishing_call(projected[own], first_value, norm, eps, turns, queries[own], *places).run()
            first += session.count
        return queries
    qk = projected[:, : heads + kv_heads]
    values = projected[:, first_value : first_value + kv_heads]
    if weights.value_norm is not None and not weights.shares:
        values = rms_norm(values, weights.value_norm, config.norm_eps)
    if weights.qk_norm is not None:
        qk = rms_norm(qk, weights.qk_norm, config.norm_eps)
    qk, first = apply_rope(qk, table), 0
    for session, cache in zip(rows.sessions, caches, strict=True) if not weights.shares else ():
        own = slice(first, first + session.count)
        cache.store(slot, session.base, qk[own, heads:], values[own])
        first += session.count
    return qk[:, :heads]
