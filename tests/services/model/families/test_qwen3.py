"""Qwen3: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from services.model.families import qwen3

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 4,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed; None removes a key."""
    return qwen3.read_config({key: value for key, value in (RAW | changes).items() if value is not None})


def test_sliding_layers_begin_at_max_window_layers() -> None:
    """Without layer_types, the layers from max_window_layers on slide, and only where use_sliding_window says so."""
    changes = {"layer_types": None, "sliding_window": 6, "max_window_layers": 3}

    assert read(use_sliding_window=True, **changes).layer_kinds == (FULL, FULL, FULL, SLIDING)
    assert read(use_sliding_window=False, **changes).layer_kinds == (FULL,) * 4
    assert read(use_sliding_window=False, **changes).sliding_window is None


def test_theta_is_read_from_both_places() -> None:
    """rope_theta counts at the top level and in rope_parameters."""
    assert read(rope_parameters=None, rope_theta=7e5).rope.theta == 7e5
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 3e5}).rope.theta == 3e5


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4}}, Unimplemented, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, Unimplemented, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, InvalidArgument, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, InvalidArgument, "beta_fast"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "ramp": "cosine"}}, Unimplemented, "ramp"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, Unimplemented, "rope_parameters"),
        ({"rope_parameters": [1e6]}, InvalidArgument, "rope_parameters"),
        ({"layer_types": 4}, InvalidArgument, "layer_types"),
        ({"num_key_value_heads": 3}, InvalidArgument, "num_attention_heads"),
        ({"num_hidden_layers": None}, InvalidArgument, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, InvalidArgument, "num_hidden_layers"),
        ({"hidden_size": "64"}, InvalidArgument, "hidden_size"),
        ({"head_dim": 15}, InvalidArgument, "partial_rotary_factor"),
        ({"rms_norm_eps": -1e-6}, InvalidArgument, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, InvalidArgument, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"] * 3}, InvalidArgument, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, InvalidArgument, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, InvalidArgument, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": None}, InvalidArgument, "sliding_window"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
