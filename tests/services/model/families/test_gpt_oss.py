"""gpt-oss: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import ClampedSwiGlu, LayerKind, ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_shapes
from services.model.rope import YarnScaling

RAW: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return read_model_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_what_is_not_said_is_as_published() -> None:
    """Windows alternate, RoPE is scaled by YaRN, gates are clamped, and the context is 131072 tokens."""
    plain = read(rope_scaling=None, rope_theta=None, swiglu_limit=None, attention_bias=None, rms_norm_eps=None)

    assert plain == read()
    assert plain.layer_kinds == (LayerKind.SLIDING, LayerKind.FULL) * 2
    assert plain.experts is not None
    assert plain.experts.clamped == ClampedSwiGlu(7.0, 1.702)
    assert isinstance(plain.rope.scaling, YarnScaling)
    assert (plain.rope.scaling.truncate, plain.max_position) == (False, 131072)
    assert read(layer_types=["full_attention"] * 4).layer_kinds == (LayerKind.FULL,) * 4


def test_tensors_of_a_layer() -> None:
    """Experts one by one with their biases, a router of another name with one, sinks, and biases of attention."""
    shapes = layer_shapes(read(), 1)

    assert shapes["mlp.experts.7.gate_proj.weight"] == (32, 64)
    assert shapes["mlp.experts.7.down_proj.bias"] == (64,)
    assert (shapes["mlp.router.weight"], shapes["mlp.router.bias"]) == ((8, 64), (8,))
    assert shapes["self_attn.sinks"] == (4,)
    assert "self_attn.o_proj.bias" in shapes
    assert "self_attn.o_proj.bias" not in layer_shapes(read(attention_bias=False), 1)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"swiglu_limit": -1.0}, InvalidArgument, "swiglu_limit"),
        ({"swiglu_alpha": "steep"}, InvalidArgument, "swiglu_alpha"),
        ({"num_experts_per_tok": 9}, InvalidArgument, "num_experts_per_tok"),
        ({"sliding_window": 0}, InvalidArgument, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 4}, InvalidArgument, "layer_types"),
        ({"partial_rotary_factor": 0.5}, Unimplemented, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, Unimplemented, "rope_type"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
