"""Qwen3 dense (`model_type: qwen3`): full or sliding attention with per-head q/k norms, and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.config import LayerKind, ModelConfig, read_layer_kinds
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope, rope_parameters


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu")
    reader.with_keys(rope_parameters(reader)).only("partial_rotary_factor", 1.0)
    layers = reader.integer("num_hidden_layers")
    window, first_sliding = None, layers
    if reader.flag("use_sliding_window", False):
        window = reader.integer("sliding_window")
        first_sliding = reader.integer("max_window_layers", 28, at_least=0)
    default = tuple(LayerKind.SLIDING if layer >= first_sliding else LayerKind.FULL for layer in range(layers))
    heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", 128)
    rope = read_rope(reader, head_dim)
    return ModelConfig(
        family="qwen3",
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        layer_kinds=read_layer_kinds(reader, default, {LayerKind.FULL, LayerKind.SLIDING}),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=context_length(reader, rope),
        tied_head=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        sliding_window=window,
    )
