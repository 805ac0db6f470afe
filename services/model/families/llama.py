"""Llama 3.x and models of its form (`model_type: llama`): full attention without norms of heads, and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.config import LayerKind, ModelConfig
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope, rope_parameters


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu")
    reader.with_keys(rope_parameters(reader)).only("partial_rotary_factor", 1.0)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", hidden // heads)
    rope = read_rope(reader, head_dim)
    return ModelConfig(
        family="llama",
        hidden_size=hidden,
        mlp_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        layer_kinds=(LayerKind.FULL,) * reader.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=context_length(reader, rope, 2048),
        tied_head=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=False,
    )
