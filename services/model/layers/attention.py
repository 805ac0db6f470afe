"""Grouped-query attention, full or over a sliding window; queries and keys may have norms of each head."""

from __future__ import annotations

from services.model.cached_tensors import CachedTensor, CacheDtype, Per
from services.model.config import ModelConfig

_OF_KEYS_AND_VALUES = ("self_attn.k_", "self_attn.v_")


def tensor_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors. A gated q_proj has double width: for each head its query, then its gate."""
    shape = config.attention(layer)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q_rows = queries * 2 if config.attention_gate else queries
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q_rows, config.hidden_size),
        "self_attn.k_proj.weight": (keys, config.hidden_size),
        "self_attn.v_proj.weight": (keys, config.hidden_size),
        "self_attn.o_proj.weight": (config.hidden_size, queries),
    }
    if shape.keys_as_values:
        del shapes["self_attn.v_proj.weight"]
    if config.qk_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    if config.gates_per_head is not None:
        shapes["self_attn.g_proj.weight"] = (shape.heads * config.gates_per_head, config.hidden_size)
    if config.attention_sinks:
        shapes["self_attn.sinks"] = (shape.heads,)
    if config.attention_bias:
        shapes |= {
            "self_attn.q_proj.bias": (q_rows,),
            "self_attn.k_proj.bias": (keys,),
            **({} if shape.keys_as_values else {"self_attn.v_proj.bias": (keys,)}),
            **({"self_attn.o_proj.bias": (config.hidden_size,)} if config.output_bias else {}),
        }
    if config.keys_of(layer) != layer:
        return {name: extents for name, extents in shapes.items() if not name.startswith(_OF_KEYS_AND_VALUES)}
    return shapes


def cached_tensors(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return the keys (after RoPE) and values of every position, unless they are another layer's."""
    if config.keys_of(layer) != layer:
        return ()
    shape = config.attention(layer)
    row = (shape.kv_heads, shape.head_dim)
    return tuple(CachedTensor(name, row, Per.TOKEN, CacheDtype.KEYS_AND_VALUES, shape.window) for name in ("k", "v"))
