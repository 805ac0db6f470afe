"""What families of Gated DeltaNet and gated attention say alike in their config.json: Qwen3-Next and all behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.errors import InvalidArgument
from services.model.config import LayerKind, LinearAttentionConfig, ModelConfig, read_layer_kinds
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope, rope_parameters


def read_hybrid(raw: Mapping[str, Any], family: str, mlp_size: int | None = None) -> ModelConfig:
    """Read a config.json as one without experts. mlp_size: inner elements of SwiGLU where it does not say them.

    Raises InvalidArgument or Unimplemented naming the key that cannot be served.
    """
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu")
    reader.only("output_gate_type", "swish", "silu")
    reader.only("attn_output_gate", True)
    layers = reader.integer("num_hidden_layers")
    interval = reader.integer("full_attention_interval", 4)
    default = tuple(LayerKind.LINEAR if (layer + 1) % interval else LayerKind.FULL for layer in range(layers))
    head_dim = reader.integer("head_dim", 256)
    partial = reader.with_keys(rope_parameters(reader)).number("partial_rotary_factor", 0.25)
    rope = read_rope(reader, int(head_dim * partial))
    linear = LinearAttentionConfig(
        key_heads=reader.integer("linear_num_key_heads", 16),
        value_heads=reader.integer("linear_num_value_heads", 32),
        key_head_dim=reader.integer("linear_key_head_dim", 128),
        value_head_dim=reader.integer("linear_value_head_dim", 128),
        conv_taps=reader.integer("linear_conv_kernel_dim", 4, at_least=2),
    )
    if linear.value_heads % linear.key_heads:
        raise InvalidArgument(
            f"config.json: linear_num_value_heads is {linear.value_heads}; it must be a multiple of "
            f"linear_num_key_heads, {linear.key_heads}",
            field="linear_num_value_heads",
        )
    return ModelConfig(
        family=family,
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size", mlp_size),
        vocab_size=reader.integer("vocab_size"),
        layer_kinds=read_layer_kinds(reader, default, {LayerKind.FULL, LayerKind.LINEAR}),
        heads=reader.integer("num_attention_heads"),
        kv_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=context_length(reader, rope),
        tied_head=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        norm_offset=1.0,
        attention_gate=True,
        linear=linear,
    )
