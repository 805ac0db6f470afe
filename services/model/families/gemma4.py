"""Gemma 4 (`model_type: gemma4_text`, and the text part of `gemma4`): sliding layers between full ones with wider
heads, whose values may be their keys, capped logits, and maybe experts beside a dense part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.errors import InvalidArgument
from services.model.config import (
    Activation,
    AttentionShape,
    ExpertsConfig,
    LayerKind,
    ModelConfig,
    PerLayerConfig,
    read_layer_kinds,
)
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope_of_kind

OWN_KEYS = frozenset({"final_logit_softcapping"})
"""Keys of other math that this family has."""

_PATTERN = 6
"""Each so-many-th layer is full where a file does not list them; the last one is in any case."""

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
"""What files may leave out."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader({**_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}})
    reader.only("hidden_activation", Activation.GELU_TANH.value)
    # Images alone would see what comes behind them, of which there are none.
    reader.only("use_bidirectional_attention", "vision")
    vocab_size, per_layer = reader.integer("vocab_size"), reader.integer("hidden_size_per_layer_input", 256, at_least=0)
    per_layer_vocab = reader.integer("vocab_size_per_layer_input", 262144)
    if per_layer and per_layer_vocab < vocab_size:
        raise InvalidArgument(
            f"config.json: vocab_size_per_layer_input is {per_layer_vocab}; it must be at least vocab_size, "
            f"{vocab_size}",
            field="vocab_size_per_layer_input",
        )
    kinds = _layer_kinds(reader)
    head_dim, mlp_size = reader.integer("head_dim"), reader.integer("intermediate_size")
    config = ModelConfig(
        family="gemma4",
        hidden_size=reader.integer("hidden_size"),
        mlp_size=mlp_size,
        vocab_size=vocab_size,
        layer_kinds=kinds,
        heads=reader.integer("num_attention_heads"),
        kv_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=read_rope_of_kind(reader, LayerKind.SLIDING, head_dim, "rope_theta", 1e4),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=reader.integer("max_position_embeddings"),
        tied_head=reader.flag("tie_word_embeddings", True),
        attention_bias=reader.flag("attention_bias", False),
        value_norm=True,
        sharing_layers=reader.integer("num_kv_shared_layers", 0, at_least=0),
        sharing_mlp_size=2 * mlp_size if reader.flag("use_double_wide_mlp", False) else None,
        sliding_window=reader.integer("sliding_window"),
        score_scale=1.0,
        per_layer=PerLayerConfig(per_layer, per_layer_vocab) if per_layer else None,
        output_norms=True,
        output_scale=True,
        activation=Activation.GELU_TANH,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        logit_cap=reader.number("final_logit_softcapping") if reader.has("final_logit_softcapping") else None,
        experts=_experts(reader, len(kinds)),
    )
    full = _full_attention(reader, config)
    return replace(config, full_attention=full, max_position=context_length(reader, full.rope))


def _layer_kinds(reader: ConfigReader) -> tuple[LayerKind, ...]:
    layers = reader.integer("num_hidden_layers")
    default = tuple(LayerKind.SLIDING if (layer + 1) % _PATTERN else LayerKind.FULL for layer in range(layers))
    return (*read_layer_kinds(reader, default, {LayerKind.FULL, LayerKind.SLIDING})[:-1], LayerKind.FULL)


def _experts(reader: ConfigReader, layers: int) -> ExpertsConfig | None:
    if not reader.flag("enable_moe_block", False):
        return None
    return ExpertsConfig(
        count=reader.integer("num_experts"),
        chosen=reader.integer("top_k_experts"),
        size=reader.integer("moe_intermediate_size"),
        normalised=True,
        layers=frozenset(range(layers)),
        router="router.proj",
        prefix="experts.",
        beside_dense=True,
    )


def _full_attention(reader: ConfigReader, config: ModelConfig) -> AttentionShape:
    """Read how full layers attend. Newer files say it by layer, older ones by keys of their own."""
    keys_as_values = reader.flag("attention_k_eq_v", False)
    own = reader
    if reader.has("per_layer_config"):
        own = reader.with_keys(_of_full_layers(reader, config.layer_kinds))
        head_dim, kv_heads = own.integer("head_dim"), own.integer("num_key_value_heads")
    else:
        head_dim = reader.integer("global_head_dim")
        kv_heads = config.kv_heads
        if keys_as_values:
            kv_heads = reader.integer("num_global_key_value_heads", kv_heads)
    rope = read_rope_of_kind(reader, LayerKind.FULL, head_dim, "rope_theta", 1e6)
    return AttentionShape(
        config.heads,
        kv_heads,
        head_dim,
        rope,
        score_scale=config.score_scale,
        keys_as_values=keys_as_values,
        value_norm=True,
    )


def _of_full_layers(reader: ConfigReader, kinds: tuple[LayerKind, ...]) -> Mapping[str, Any]:
    """Return what `per_layer_config` says of full layers, of all the same."""
    by_layer = reader.mapping("per_layer_config")
    full = [by_layer.get(str(layer)) for layer, kind in enumerate(kinds) if kind is LayerKind.FULL]
    first = full[0]
    if (
        not isinstance(first, Mapping)
        or len(by_layer) != len(full)
        or any(one != first for one in full)
        or set(first) - {"head_dim", "num_key_value_heads"}
    ):
        raise InvalidArgument(
            "config.json: per_layer_config must have the same head_dim and num_key_value_heads for each full layer, "
            "and nothing else",
            field="per_layer_config",
        )
    return first
