"""Laguna: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_shapes
from services.model.rope import YarnScaling

RAW: dict[str, Any] = {
    "model_type": "laguna",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "num_attention_heads_per_layer": [4, 8, 8],
    "gating": "per-head",
    "moe_routed_scaling_factor": 2.5,
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return read_model_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_tensors_of_layers() -> None:
    """A dense layer and one with experts, each with its own heads and gates."""
    config = read()
    dense, sparse = layer_shapes(config, 0), layer_shapes(config, 1)

    assert (dense["self_attn.q_proj.weight"], sparse["self_attn.q_proj.weight"]) == ((64, 64), (128, 64))
    assert (dense["self_attn.g_proj.weight"], sparse["self_attn.g_proj.weight"]) == ((4, 64), (8, 64))
    assert layer_shapes(read(gating="per-element"), 1)["self_attn.g_proj.weight"] == (128, 64)
    assert dense["mlp.up_proj.weight"] == (128, 64)
    assert sparse["mlp.experts.e_score_correction_bias"] == (8,)
    assert sparse["mlp.shared_expert.up_proj.weight"] == (48, 64)
    assert "mlp.shared_expert_gate.weight" not in sparse
    assert read(mlp_layer_types=["sparse", "dense", "dense"]).feed_forward(0) == "experts"
    assert read(num_attention_heads_per_layer=[4, 4, 4]) == read(num_attention_heads_per_layer=None)


def test_each_kind_of_layers_has_rope_of_its_own() -> None:
    """Half of a head and all of it unless said otherwise, and a context as long as the scaling of full layers says."""
    full, sliding = read().attention(0).rope, read().attention(1).rope
    assert (full.rotary_dim, full.theta, sliding.rotary_dim, sliding.theta) == (8, 500_000.0, 16, 10_000.0)
    scaled = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "rope_theta": 1e6}
    config = read(rope_parameters={LayerKind.FULL: scaled, LayerKind.SLIDING: {"rope_theta": 1e4}})
    assert isinstance(config.attention(0).rope.scaling, YarnScaling)
    assert config.attention(1).rope == sliding
    assert config.max_position == 262144


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"gating": False}, Unimplemented, "gating"),
        ({"gating": "per-layer"}, Unimplemented, "gating"),
        ({"moe_apply_router_weight_on_input": True}, Unimplemented, "moe_apply_router_weight_on_input"),
        ({"moe_router_logit_softcapping": -1.0}, InvalidArgument, "moe_router_logit_softcapping"),
        ({"moe_routed_scaling_factor": 0}, InvalidArgument, "moe_routed_scaling_factor"),
        ({"num_attention_heads_per_layer": [4, 8]}, InvalidArgument, "num_attention_heads_per_layer"),
        ({"num_attention_heads_per_layer": [4, 8, 7]}, InvalidArgument, "num_attention_heads"),
        ({"mlp_layer_types": ["dense", "moe", "dense"]}, InvalidArgument, "mlp_layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4}}, InvalidArgument, "rope_parameters"),
        ({"num_experts_per_tok": 9}, InvalidArgument, "num_experts_per_tok"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
