"""Gemma 3 (`model_type: gemma3_text`, and the text part of `gemma3`): sliding layers between full ones, each with RoPE
of its own, four norms a layer, and GELU in place of SiLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.model.config import Activation, AttentionShape, LayerKind, ModelConfig, read_layer_kinds
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope_of_kind

OWN_KEYS = frozenset({"final_logit_softcapping", "query_pre_attn_scalar"})
"""Keys of other math that this family has."""

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""What published files leave out."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader({**_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}})
    for key in ("hidden_activation", "hidden_act"):
        reader.only(key, Activation.GELU_TANH.value)
    reader.only("use_bidirectional_attention", False)
    layers, pattern = reader.integer("num_hidden_layers"), reader.integer("sliding_window_pattern", 6)
    kinds = tuple(LayerKind.SLIDING if (layer + 1) % pattern else LayerKind.FULL for layer in range(layers))
    head_dim = reader.integer("head_dim")
    full_rope = read_rope_of_kind(reader, LayerKind.FULL, head_dim, "rope_theta", 1e6)
    config = ModelConfig(
        family="gemma3",
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        layer_kinds=read_layer_kinds(reader, kinds, {LayerKind.FULL, LayerKind.SLIDING}),
        heads=reader.integer("num_attention_heads"),
        kv_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=read_rope_of_kind(reader, LayerKind.SLIDING, head_dim, "rope_local_base_freq", 1e4),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=context_length(reader, full_rope),
        tied_head=reader.flag("tie_word_embeddings", True),
        norm_offset=1.0,
        attention_bias=reader.flag("attention_bias", False),
        sliding_window=reader.integer("sliding_window"),
        score_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        output_norms=True,
        activation=Activation.GELU_TANH,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        logit_cap=reader.number("final_logit_softcapping") if reader.has("final_logit_softcapping") else None,
    )
    full = AttentionShape(config.heads, config.kv_heads, config.head_dim, full_rope, score_scale=config.score_scale)
    return replace(config, full_attention=full)
