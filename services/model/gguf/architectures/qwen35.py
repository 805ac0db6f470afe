"""Qwen3.5 and 3.6 dense: the converter changes norms, decays, the convolution's shape and the order of value heads.

Norms that a checkpoint has centred on 0 are stored as w + 1, except those of linear layers; `ssm_a` is -exp(A_log).
Value heads are tiled instead of grouped by key head: in the rows of what makes values, gates, decays and betas, and in
the columns of what takes values. The last layer guesses further tokens (MTP) where `nextn_predict_layers` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.errors import InvalidArgument
from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import DECODER_NAMES, decoder_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import Elements, HeadOrder, StoredTensor

_CENTRED_NORMS = frozenset(
    {
        "model.norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
)


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    return hybrid_config(metadata, decoder_config(metadata, tensors)) | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
    }


def hybrid_config(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decoder's configuration with what the metadata says of recurrent layers. Raises as `read_config`."""
    layers = config["num_hidden_layers"] - metadata.integer("{arch}.nextn_predict_layers", 0, at_least=0)
    heads, inner = metadata.integer("{arch}.ssm.time_step_rank"), metadata.integer("{arch}.ssm.inner_size")
    if layers < 1 or inner % heads:
        raise InvalidArgument(
            f"{metadata.path}: nextn_predict_layers must be below block_count, and ssm.inner_size, {inner}, a multiple "
            f"of ssm.time_step_rank, {heads}",
            field="ssm.inner_size",
        )
    rotated = metadata.integer("{arch}.rope.dimension_count", config["head_dim"])
    return {
        **config,
        "num_hidden_layers": layers,
        "full_attention_interval": metadata.integer("{arch}.full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.integer("{arch}.ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("{arch}.ssm.state_size"),
        "linear_num_key_heads": metadata.integer("{arch}.ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": rotated / config["head_dim"]},
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return DECODER_NAMES | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    }


def unchanged_order(name: str, tensor: GgufTensor) -> StoredTensor:
    """Return a tensor with what was changed of it, except for the order of value heads."""
    if name in _CENTRED_NORMS:
        return StoredTensor(tensor, tensor.shape, Elements.PLUS_ONE)
    if name == "linear_attn.conv1d.weight":
        return StoredTensor(tensor, (tensor.shape[0], 1, *tensor.shape[1:]))
    return StoredTensor(tensor, tensor.shape, Elements.MINUS_EXP if name == "linear_attn.A_log" else Elements.SAME)


def stored_tensor(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor with what was changed of it."""
    stored = unchanged_order(name, tensor)
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    heads_per_key = config["linear_num_value_heads"] // keys

    def order(size: int, first: int = 0) -> HeadOrder:
        return HeadOrder(keys, heads_per_key, size, first)

    queries_and_keys = 2 * keys * config["linear_key_head_dim"]
    match name:
        case "linear_attn.in_proj_qkv.weight" | "linear_attn.conv1d.weight":
            return replace(stored, rows=order(width, queries_and_keys))
        case "linear_attn.in_proj_z.weight":
            return replace(stored, rows=order(width))
        case "linear_attn.in_proj_a.weight" | "linear_attn.in_proj_b.weight":
            return replace(stored, rows=order(1))
        case "linear_attn.dt_bias" | "linear_attn.A_log":
            return replace(stored, rows=order(1))
        case "linear_attn.out_proj.weight":
            return replace(stored, columns=order(width))
        case _:
            return stored
