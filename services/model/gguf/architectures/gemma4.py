"""Gemma 4: full layers have sizes of heads of their own, and sizes may be said by layer. Which part of their heads
turns stands in divisors of frequencies, `rope_freqs.weight`: 1 for those pairs that do, and a huge number for the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.errors import InvalidArgument
from services.model.gguf.architectures import gemma3
from services.model.gguf.architectures.llama import DIVISORS, read_numbers
from services.model.gguf.container import GgufTensor
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import stored_unchanged

_HEAD_DIM, _KV_HEADS = "{arch}.attention.key_length", "{arch}.attention.head_count_kv"
_INNER = "{arch}.feed_forward_length"

stored_tensor = stored_unchanged


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    layers, wide = metadata.integer("{arch}.block_count"), metadata.integer(_HEAD_DIM)
    narrow, inner = metadata.integer(f"{_HEAD_DIM}_swa"), metadata.by_layer(_INNER, layers)
    kv_heads = metadata.by_layer(_KV_HEADS, layers)
    plain = metadata.with_keys({_HEAD_DIM: narrow, _KV_HEADS: kv_heads[0], _INNER: inner[0]})
    config = gemma3.gemma_config(plain, tensors)
    proportional = {"rope_type": "proportional", "partial_rotary_factor": _turning(metadata, tensors, wide)}
    full = [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    sliding = [layer for layer in range(layers) if layer not in full]
    heads = {kind: {kv_heads[layer] for layer in of} for kind, of in (("full", full), ("sliding", sliding))}
    if any(len(found) != 1 for found in heads.values()):
        raise InvalidArgument(
            f"{metadata.path}: attention.head_count_kv is {kv_heads}; it must be one number for all full layers, and "
            "one for all sliding ones, and there must be both",
            field="attention.head_count_kv",
        )
    own = metadata.integer("{arch}.embedding_length_per_layer_input", 0, at_least=0)
    rope = config["rope_parameters"]
    return {
        **config,
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_key_value_heads": min(heads["sliding"]),
        "num_global_key_value_heads": min(heads["full"]),
        "global_head_dim": wide,
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in tensors,
        "rope_parameters": rope | {"full_attention": rope["full_attention"] | proportional},
        "num_kv_shared_layers": metadata.integer("{arch}.attention.shared_kv_layers", 0, at_least=0),
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": own,
        "vocab_size_per_layer_input": config["vocab_size"],
        **_experts(metadata),
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return {
        **gemma3.tensor_names(),
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }


def _turning(metadata: Metadata, tensors: Mapping[str, GgufTensor], head_dim: int) -> float:
    """Return which part of full layers' heads turns. Raises InvalidArgument for divisors that do not say that."""
    if DIVISORS not in tensors:
        return 1.0
    divisors = read_numbers(tensors[DIVISORS])
    turning = divisors.count(1.0)
    if (
        len(divisors) != head_dim // 2
        or divisors[:turning] != [1.0] * turning
        or min(divisors[turning:], default=1e9) < 1e9
    ):
        raise InvalidArgument(
            f"{metadata.path}: {DIVISORS} must be {head_dim // 2} numbers, 1 for the first ones and at least 1e9 for "
            "all behind these",
            field=DIVISORS,
        )
    return 2 * turning / head_dim


def _experts(metadata: Metadata) -> dict[str, Any]:
    count = metadata.integer("{arch}.expert_count", 0, at_least=0)
    if not count:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": metadata.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
    }
