"""Gemma 4: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.config import LayerKind, ModelConfig, PerLayerConfig
from services.model.families import read_model_config
from services.model.layers import layer_caches, layer_shapes, read_share
from services.model.rope import ProportionalScaling, Rope
from services.model.target_tensors import target_shapes

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
RAW: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "attention_k_eq_v": True,
    "vocab_size": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}


def read(**changes: Any) -> ModelConfig:
    """The shape that the config gives once some keys are changed."""
    return read_model_config(RAW | changes)


def test_full_layers_have_heads_and_rope_of_their_own() -> None:
    """The sixth layer, and the last one in any case: wider heads, fewer keys, which are values too, and a quarter of
    the pairs turns."""
    config = read()
    sliding, full = config.attention(0), config.attention(5)

    assert config.layer_kinds == (*(SLIDING,) * 5, FULL, SLIDING, FULL)
    assert (sliding.heads, sliding.kv_heads, sliding.head_dim, sliding.window) == (4, 2, 32, 512)
    assert (full.heads, full.kv_heads, full.head_dim, full.window) == (4, 1, 64, None)
    assert (sliding.keys_as_values, full.keys_as_values) == (False, True)
    assert sliding.rope == Rope(32, 1e4)
    assert full.rope == Rope(64, 1e6, ProportionalScaling(8, 1.0))
    assert (sliding.score_scale, full.score_scale, config.norm_offset) == (1.0, 1.0, 0.0)
    assert layer_shapes(config, 0)["self_attn.v_proj.weight"] == (64, 64)
    assert "self_attn.v_proj.weight" not in layer_shapes(config, 5)
    assert layer_shapes(config, 5)["layer_scalar"] == (1,)
    assert [tensor.shape for tensor in layer_caches(config, 5)] == [(1, 64)] * 2


def test_newer_files_say_full_layers_one_by_one() -> None:
    """As the reference writes them since it has settings by layer."""
    wide = {"head_dim": 64, "num_key_value_heads": 1}
    newer = {"global_head_dim": None, "num_global_key_value_heads": None, "per_layer_config": {"5": wide, "7": wide}}

    assert read(**newer) == read()


def test_without_keys_as_values_all_layers_have_as_many_keys() -> None:
    """And projections of values."""
    config = read(attention_k_eq_v=False)

    assert config.attention(5).kv_heads == 2
    assert layer_shapes(config, 5)["self_attn.v_proj.weight"] == (128, 64)


def test_the_last_layers_may_share_keys_and_values() -> None:
    """With the last layer of their kind before them: they have and keep none, and may have wider dense parts."""
    config = read(num_kv_shared_layers=2, use_double_wide_mlp=True)

    assert [config.keys_of(layer) for layer in range(8)] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert (config.last_cut, read().last_cut) == (4, 7)
    assert {name for name in layer_shapes(config, 6) if "self_attn" in name} == {
        f"self_attn.{name}.weight" for name in ("q_proj", "q_norm", "o_proj")
    }
    assert (layer_caches(config, 6), len(layer_caches(config, 5))) == ((), 2)
    assert [layer_shapes(config, layer)["mlp.up_proj.weight"] for layer in (5, 6)] == [(128, 64), (256, 64)]


def test_tokens_may_bring_inputs_of_each_layer() -> None:
    """A table for all layers, and matrices of each."""
    config = read(**PER_LAYER)

    assert layer_shapes(config, 0)["per_layer_input_gate.weight"] == (16, 64)
    assert target_shapes(config)["model.embed_tokens_per_layer.weight"] == (256, 8 * 16)
    assert read(hidden_size_per_layer_input=None, vocab_size_per_layer_input=None).per_layer == PerLayerConfig(
        256, 262144
    )


def test_experts_stand_beside_the_dense_part() -> None:
    """In all layers, with a router and norms of their own; a row reads those alone that it goes through."""
    config = read(**EXPERTS)
    shapes = layer_shapes(config, 0)

    assert shapes["mlp.gate_proj.weight"] == (128, 64)
    assert shapes["experts.7.down_proj.weight"] == (64, 32)
    assert shapes["router.proj.weight"] == (8, 64)
    assert read_share(config, "model.layers.0.experts.3.up_proj.weight") == 0.25
    assert read_share(config, "experts.3.up_proj.weight") == 0.25
    assert read_share(config, "mlp.up_proj.weight") == 1.0


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"hidden_activation": "silu"}, Unimplemented, "hidden_activation"),
        ({"attn_logit_softcapping": 50.0}, Unimplemented, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": "all"}, Unimplemented, "use_bidirectional_attention"),
        (PER_LAYER | {"vocab_size_per_layer_input": 255}, InvalidArgument, "vocab_size_per_layer_input"),
        ({"num_kv_shared_layers": 3}, InvalidArgument, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 8}, InvalidArgument, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 9}, InvalidArgument, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, InvalidArgument, "num_kv_shared_layers"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, InvalidArgument, "per_layer_config"),
        ({"per_layer_config": {"5": {"sliding_window": 8}, "7": {}}}, InvalidArgument, "per_layer_config"),
        (EXPERTS | {"top_k_experts": 9}, InvalidArgument, "num_experts_per_tok"),
        (EXPERTS | {"num_experts": None}, InvalidArgument, "num_experts"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, Unimplemented, "rope_type"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            Unimplemented,
            "partial_rotary_factor",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "beta": 0.5}}},
            Unimplemented,
            "beta",
        ),
    ],
)
def test_a_key_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A config that asks for other math, or contradicts itself, is refused and not served as something else."""
    with pytest.raises(kind) as caught:
        read(**changes)

    assert caught.value.where["field"] == field
