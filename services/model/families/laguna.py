"""Laguna (`model_type: laguna`), such as XS.2: attention whose heads have gates, with other numbers of heads and other
RoPE in full and sliding layers, and experts that a router of sigmoids chooses, beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.errors import InvalidArgument
from services.model.config import (
    AttentionShape,
    ExpertsConfig,
    LayerKind,
    ModelConfig,
    SigmoidRouting,
    read_layer_kinds,
)
from services.model.config_reader import ConfigReader
from services.model.rope import Rope, context_length, read_rope, rope_parameters

_ROPES: Mapping[str, Mapping[str, Any]] = {
    LayerKind.FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    LayerKind.SLIDING: {"rope_theta": 10_000.0},
}
"""RoPE where the configuration says nothing of it."""

_MLP_KINDS = ("dense", "sparse")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu")
    reader.only("gating", True, "per-head", "per-element")
    reader.only("moe_apply_router_weight_on_input", False)
    layers, heads = reader.integer("num_hidden_layers", 40), reader.integer("num_attention_heads", 48)
    head_dim = reader.integer("head_dim", 128)
    full_rope, sliding_rope = (_read_rope(reader, kind, head_dim) for kind in (LayerKind.FULL, LayerKind.SLIDING))
    cap = reader.raw("moe_router_logit_softcapping")
    experts = ExpertsConfig(
        count=reader.integer("num_experts", 256),
        chosen=reader.integer("num_experts_per_tok", 8),
        size=reader.integer("moe_intermediate_size", 512),
        normalised=True,
        layers=_sparse_layers(reader, layers),
        shared_size=reader.integer("shared_expert_intermediate_size", 512),
        shared_gated=False,
        sigmoid=SigmoidRouting(
            bias="mlp.experts.e_score_correction_bias",
            scale=reader.number("moe_routed_scaling_factor", 1.0),
            cap=reader.number("moe_router_logit_softcapping") if cap else None,
        ),
    )
    config = ModelConfig(
        family="laguna",
        hidden_size=reader.integer("hidden_size", 2048),
        mlp_size=reader.integer("intermediate_size", 8192),
        vocab_size=reader.integer("vocab_size", 100352),
        layer_kinds=read_layer_kinds(reader, (LayerKind.FULL,) * layers, {LayerKind.FULL, LayerKind.SLIDING}),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        rope=sliding_rope,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=context_length(reader, full_rope, 131072),
        tied_head=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        gates_per_head=head_dim if reader.raw("gating") == "per-element" else 1,
        layer_heads=_layer_heads(reader, layers, heads),
        sliding_window=reader.integer("sliding_window", 512),
        experts=experts,
    )
    return replace(config, full_attention=AttentionShape(heads, config.kv_heads, head_dim, full_rope))


def _read_rope(reader: ConfigReader, kind: LayerKind, head_dim: int) -> Rope:
    """Read RoPE of one kind of layers; `rope_parameters` has an object of each."""
    own = (rope_parameters(reader) or _ROPES).get(kind)
    if not isinstance(own, Mapping):
        raise InvalidArgument(
            f"config.json: rope_parameters has {own!r} for {kind}; it must be an object for each kind of layers",
            field="rope_parameters",
        )
    own_reader = reader.with_keys({"rope_theta": None, "rope_scaling": None, "rope_parameters": own})
    rotated = own_reader.with_keys({"partial_rotary_factor": None, **own}).number("partial_rotary_factor", 1.0)
    return read_rope(own_reader, int(head_dim * rotated))


def _layer_heads(reader: ConfigReader, layers: int, heads: int) -> tuple[int, ...] | None:
    """Return the query heads of each layer, None where all have as many as the model says of all."""
    key = "num_attention_heads_per_layer"
    given = reader.raw(key)
    if given is None:
        return None
    if (
        not isinstance(given, list)
        or len(given) != layers
        or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in given)
    ):
        raise InvalidArgument(
            f"config.json: {key} is {given!r}; it must be {layers} whole numbers of at least 1", field=key
        )
    return None if set(given) == {heads} else tuple(given)


def _sparse_layers(reader: ConfigReader, layers: int) -> frozenset[int]:
    """Return the layers that have experts: all but the first, unless `mlp_layer_types` says which."""
    key = "mlp_layer_types"
    given = reader.raw(key)
    kinds = ["dense", *["sparse"] * (layers - 1)] if given is None else given
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _MLP_KINDS for kind in kinds):
        raise InvalidArgument(
            f"config.json: {key} must name {layers} layers, each one of {', '.join(_MLP_KINDS)}", field=key
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
