"""GLM-4.5 and later with experts (`model_type: glm4_moe`), such as 4.5-Air: attention whose heads rotate in part, and
experts that a router of sigmoids chooses, beside a shared one, behind dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.config import ExpertsConfig, LayerKind, ModelConfig, SigmoidRouting
from services.model.config_reader import ConfigReader
from services.model.rope import context_length, read_rope, rope_parameters

OWN_KEYS = frozenset({"use_qk_norm"})


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. Raises InvalidArgument or Unimplemented naming the key that cannot be served."""
    reader = ConfigReader(raw)
    reader.only("hidden_act", "silu")
    # With more, experts are chosen group by group.
    reader.only("n_group", 1)
    reader.only("topk_group", 1)
    layers, heads = reader.integer("num_hidden_layers", 46), reader.integer("num_attention_heads", 96)
    hidden, size = reader.integer("hidden_size", 4096), reader.integer("moe_intermediate_size", 1408)
    head_dim = reader.integer("head_dim", hidden // heads)
    partial = reader.with_keys(rope_parameters(reader)).number("partial_rotary_factor", 0.5)
    rope = read_rope(reader, int(head_dim * partial))
    experts = ExpertsConfig(
        count=reader.integer("n_routed_experts", 128),
        chosen=reader.integer("num_experts_per_tok", 8),
        size=size,
        normalised=reader.flag("norm_topk_prob", True),
        layers=frozenset(range(reader.integer("first_k_dense_replace", 1, at_least=0), layers)),
        shared_size=size * reader.integer("n_shared_experts", 1),
        shared="mlp.shared_experts",
        shared_gated=False,
        sigmoid=SigmoidRouting("mlp.gate.e_score_correction_bias", reader.number("routed_scaling_factor", 1.0)),
    )
    return ModelConfig(
        family="glm4_moe",
        hidden_size=hidden,
        mlp_size=reader.integer("intermediate_size", 10944),
        vocab_size=reader.integer("vocab_size", 151552),
        layer_kinds=(LayerKind.FULL,) * layers,
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        rope=rope,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        max_position=context_length(reader, rope, 131072),
        tied_head=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        output_bias=False,
        qk_norm=reader.flag("use_qk_norm", False),
        experts=experts,
    )
