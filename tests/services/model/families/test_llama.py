"""Llama: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from services.model.families import llama
from services.model.layers import layer_shapes
from services.model.rope import Llama3Scaling

RAW: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return llama.read_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_the_shape_of_llama_3() -> None:
    """Heads share the hidden size unless their size is given, and have no norms; the context is the scaled one."""
    config = read()

    assert (config.head_dim, config.rope.rotary_dim, config.max_position) == (16, 16, 131072)
    assert config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert config.layer_kinds == (LayerKind.FULL,) * 2
    assert read(head_dim=32).head_dim == 32
    assert read(num_key_value_heads=None).kv_heads == 4
    assert not {name for name in layer_shapes(config, 0) if "q_norm" in name or name.endswith("bias")}


def test_biases_are_those_that_the_flags_name() -> None:
    """Of attention's four projections, and of SwiGLU's three."""
    biases = {name: shape for name, shape in layer_shapes(read(mlp_bias=True), 0).items() if name.endswith("bias")}

    assert biases == {"mlp.gate_proj.bias": (128,), "mlp.up_proj.bias": (128,), "mlp.down_proj.bias": (64,)}
    assert layer_shapes(read(attention_bias=True), 0)["self_attn.o_proj.bias"] == (64,)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, Unimplemented, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, Unimplemented, "partial_rotary_factor"),
        ({"rope_scaling": RAW["rope_scaling"] | {"high_freq_factor": 1.0}}, InvalidArgument, "high_freq_factor"),
        ({"rope_scaling": RAW["rope_scaling"] | {"low_freq_factor": None}}, InvalidArgument, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "divided", "divisors": [1.0] * 7}}, InvalidArgument, "divisors"),
        ({"num_key_value_heads": 3}, InvalidArgument, "num_attention_heads"),
        ({"mlp_bias": "no"}, InvalidArgument, "mlp_bias"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
