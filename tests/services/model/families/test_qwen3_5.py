"""Qwen3.5: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from services.model.families import qwen3_5

FULL, LINEAR = LayerKind.FULL, LayerKind.LINEAR
RAW: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return qwen3_5.read_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_every_fourth_layer_has_attention_unless_said_otherwise() -> None:
    """Without layer_types, full_attention_interval (by default 4) places the attention layers."""
    assert read(layer_types=None).layer_kinds == (LINEAR, LINEAR, LINEAR, FULL) * 2
    spread = read(layer_types=None, full_attention_interval=2)
    assert spread.layer_kinds == (LINEAR, FULL) * 4


def test_a_quarter_of_a_head_rotates_unless_said_otherwise() -> None:
    """partial_rotary_factor counts in rope_parameters and at the top level, and is a quarter without either."""
    rope = {"rope_type": "default", "rope_theta": 1e4}

    assert read(rope_parameters=rope).rope.rotary_dim == 8
    assert read(rope_parameters=rope, partial_rotary_factor=0.5).rope.rotary_dim == 16
    assert read(rope_parameters=rope | {"partial_rotary_factor": 1.0}).rope.rotary_dim == 32


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"attn_output_gate": False}, Unimplemented, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, Unimplemented, "output_gate_type"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4}}, Unimplemented, "rope_type"),
        ({"partial_rotary_factor": 0.01, "rope_parameters": None}, InvalidArgument, "partial_rotary_factor"),
        ({"linear_num_value_heads": 3}, InvalidArgument, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, InvalidArgument, "linear_conv_kernel_dim"),
        ({"num_key_value_heads": 3}, InvalidArgument, "num_attention_heads"),
        ({"layer_types": ["sliding_attention"] * 8}, InvalidArgument, "layer_types"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
