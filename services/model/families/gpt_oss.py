"""gpt-oss (`model_type: gpt_oss`), 20b and 120b: attention with sinks, every other layer over a window, and experts
whose gates are clamped, with biases throughout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.config import ClampedSwiGlu, ExpertsConfig, LayerKind, ModelConfig, read_layer_kinds
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope, rope_parameters

OWN_KEYS = frozenset({"swiglu_limit"})

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE where the configuration says nothing of it."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu")
    if not rope_parameters(reader):
        reader = reader.with_keys({"rope_parameters": _ROPE})
    reader.with_keys(rope_parameters(reader)).only("partial_rotary_factor", 1.0)
    layers = reader.integer("num_hidden_layers", 36)
    alternating = tuple(LayerKind.FULL if layer % 2 else LayerKind.SLIDING for layer in range(layers))
    heads, head_dim = reader.integer("num_attention_heads", 64), reader.integer("head_dim", 64)
    size = reader.integer("intermediate_size", 2880)
    rope = read_rope(reader, head_dim, 150_000.0)
    experts = ExpertsConfig(
        count=reader.integer("num_experts" if reader.has("num_experts") else "num_local_experts", 128),
        chosen=reader.integer("num_experts_per_tok", 4),
        size=size,
        # The softmax of the chosen scores is that of all of them, made to sum up to 1 again.
        normalised=True,
        layers=frozenset(range(layers)),
        router="mlp.router",
        biased=True,
        clamped=ClampedSwiGlu(reader.number("swiglu_limit", 7.0), reader.number("swiglu_alpha", 1.702)),
    )
    return ModelConfig(
        family="gpt_oss",
        hidden_size=reader.integer("hidden_size", 2880),
        mlp_size=size,
        vocab_size=reader.integer("vocab_size", 201088),
        layer_kinds=read_layer_kinds(reader, alternating, {LayerKind.FULL, LayerKind.SLIDING}),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        rope=rope,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        max_position=context_length(reader, rope, 131072),
        tied_head=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", True),
        qk_norm=False,
        attention_sinks=True,
        sliding_window=reader.integer("sliding_window", 128),
        experts=experts,
    )
