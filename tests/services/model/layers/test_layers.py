"""The tensors and caches of whole layers, put together from their sublayers."""

from __future__ import annotations

import math

from services.model.cached_tensors import CachedTensor, Per
from services.model.families import read_model_config
from services.model.layers import layer_caches, layer_shapes
from services.model.target_tensors import target_shapes
from tests.services.model.families.test_families import RAW


def test_a_layer_has_the_tensors_of_its_sublayers() -> None:
    """Norms and SwiGLU in every layer, one mixer's tensors beside them; a gated q_proj is twice as high."""
    dense, hybrid = (read_model_config(RAW[name]) for name in ("qwen3", "qwen3_5"))

    assert layer_shapes(dense, 0)["self_attn.q_proj.weight"] == (64, 64)
    assert layer_shapes(hybrid, 3)["self_attn.q_proj.weight"] == (2 * 128, 64)
    assert layer_shapes(hybrid, 0)["linear_attn.conv1d.weight"] == (128, 1, 4)
    for config in (dense, hybrid):
        for layer in range(config.num_layers):
            shapes = layer_shapes(config, layer)
            assert shapes["input_layernorm.weight"] == shapes["post_attention_layernorm.weight"] == (64,)
            assert shapes["mlp.down_proj.weight"] == (64, 128)
            mixers = {name.partition(".")[0] for name in shapes} & {"self_attn", "linear_attn"}
            assert mixers == {"linear_attn" if config.layer_kinds[layer] == "linear_attention" else "self_attn"}


def test_a_tied_checkpoint_has_no_lm_head() -> None:
    """All other tensors are those of an untied one."""
    untied, tied = (
        target_shapes(read_model_config(RAW["qwen3"] | {"tie_word_embeddings": tie})) for tie in (False, True)
    )

    assert set(untied) - set(tied) == {"lm_head.weight"}
    assert untied["lm_head.weight"] == untied["model.embed_tokens.weight"] == (256, 64)


def test_attention_grows_with_tokens_and_recurrent_state_does_not() -> None:
    """Bytes of one position, of the state and of a verify's row, by hand."""
    config = read_model_config(RAW["qwen3_5"])
    linear, attention = layer_caches(config, 0), layer_caches(config, 3)

    def size(tensors: tuple[CachedTensor, ...], per: Per) -> int:
        return sum(tensor.size_bytes("bfloat16", "float8_e4m3fn") for tensor in tensors if tensor.per is per)

    assert size(attention, Per.TOKEN) == 2 * 2 * 32
    assert size(attention, Per.SESSION) == size(attention, Per.BLOCK_ROW) == size(linear, Per.TOKEN) == 0
    assert size(linear, Per.SESSION) == 4 * math.prod((4, 16, 16)) + 2 * 3 * 128
    assert size(linear, Per.BLOCK_ROW) == 2 * 128 + 4 * 4 * (16 + 16 + 1)
