"""GLM-4.5 with experts: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_shapes

RAW: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return read_model_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_tensors_of_layers() -> None:
    """Dense layers come first; biases are those of queries, keys and values alone."""
    config = read(n_shared_experts=2)
    assert [config.feed_forward(layer) for layer in range(3)] == ["swiglu", "experts", "experts"]
    shapes = layer_shapes(config, 1)
    assert shapes["mlp.gate.e_score_correction_bias"] == (8,)
    assert shapes["mlp.shared_experts.up_proj.weight"] == (64, 64)
    assert "self_attn.v_proj.bias" in shapes
    assert not {"self_attn.o_proj.bias", "self_attn.q_norm.weight", "mlp.shared_experts_gate.weight"} & shapes.keys()
    assert "self_attn.q_norm.weight" in layer_shapes(read(use_qk_norm=True), 1)
    assert (read().rope.rotary_dim, read(partial_rotary_factor=None).rope.rotary_dim) == (8, 8)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"n_group": 8}, Unimplemented, "n_group"),
        ({"topk_group": 4}, Unimplemented, "topk_group"),
        ({"routed_scaling_factor": -1.0}, InvalidArgument, "routed_scaling_factor"),
        ({"num_experts_per_tok": 9}, InvalidArgument, "num_experts_per_tok"),
        ({"first_k_dense_replace": -1}, InvalidArgument, "first_k_dense_replace"),
        ({"use_qk_norm": "yes"}, InvalidArgument, "use_qk_norm"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
