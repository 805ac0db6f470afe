"""Gemma 3: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_shapes
from services.model.rope import LinearScaling, Rope, with_rope_scaling

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
SCALING = {"rope_type": "linear", "factor": 8.0}
RAW: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": SCALING,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed."""
    return read_model_config(RAW | changes)


def test_each_kind_of_layers_has_its_own_rope() -> None:
    """Every sixth layer is full and stretched; others slide, by a base of their own."""
    config = read()

    assert config.layer_kinds == (*(SLIDING,) * 5, FULL, SLIDING)
    assert config.attention(0).rope == Rope(32, 1e4)
    assert config.attention(5).rope == Rope(32, 1e6, LinearScaling(8.0))
    assert [config.attention(layer).window for layer in (0, 5)] == [512, None]
    assert {shape.score_scale for shape in config.attention_shapes.values()} == {0.125}
    assert (config.embedding_scale, config.tied_head, config.norm_offset) == (8.0, True, 1.0)
    assert len([name for name in layer_shapes(config, 0) if name.endswith("layernorm.weight")]) == 4


def test_newer_files_say_the_same() -> None:
    """With an object of RoPE for each kind, and the kinds of all layers."""
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    rope = {
        "full_attention": SCALING | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = {"sliding_window_pattern": None, "rope_theta": None, "rope_local_base_freq": None, "rope_scaling": None}

    assert read(**newer, layer_types=kinds, rope_parameters=rope) == read()


def test_what_published_files_leave_out() -> None:
    """Those of models with a tower say little more than what differs from the smallest one."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = read_model_config({"model_type": "gemma3", "text_config": text | {"rope_scaling": SCALING}})

    assert (config.family, config.heads, config.kv_heads, config.head_dim) == ("gemma3", 8, 4, 256)
    assert (config.vocab_size, config.max_position, config.tied_head) == (262208, 131072, True)
    assert config.attention(5).rope == Rope(256, 1e6, LinearScaling(8.0))


def test_a_scaling_that_is_asked_for_is_that_of_full_layers() -> None:
    """Whether the file has an object of RoPE for each kind or for full layers alone; their base stays."""
    by_kind = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 2e4}}
    asked = '{"factor": 4.0, "rope_type": "linear"}'
    for changes, bases in (({}, (1e4, 1e6)), ({"rope_parameters": by_kind, "rope_scaling": None}, (2e4, 2e6))):
        config = read_model_config(with_rope_scaling(RAW | changes, asked))
        assert config.attention(0).rope == Rope(32, bases[0])
        assert config.attention(5).rope == Rope(32, bases[1], LinearScaling(4.0))


def test_logits_may_be_capped() -> None:
    """Published files do not, but the reference would."""
    assert read(final_logit_softcapping=30.0).logit_cap == 30.0
    assert read().logit_cap is None


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_activation": "silu"}, Unimplemented, "hidden_activation"),
        ({"attn_logit_softcapping": 50.0}, Unimplemented, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, Unimplemented, "use_bidirectional_attention"),
        ({"final_logit_softcapping": -1.0}, InvalidArgument, "final_logit_softcapping"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, Unimplemented, "rope_type"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": 3}}, InvalidArgument, "rope_parameters"),
        ({"layer_types": ["linear_attention"] * 7}, InvalidArgument, "layer_types"),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
