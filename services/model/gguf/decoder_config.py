"""What the metadata of all decoders says alike, in the words of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.errors import InvalidArgument
from services.model.gguf.container import GgufTensor
from services.model.gguf.metadata import Metadata

_FIRST_EXPERTS = "blk.0.ffn_down_exps.weight"
_SOFTMAX = 1
"""How files call a router that takes the softmax of its scores."""

DECODER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of a layer's tensors in checkpoints by those in files, without .weight and .bias."""


EXPERTS_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""The same of a layer whose feed-forward part is a mixture of experts."""


def experts_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the sizes of a mixture of experts, which all layers have. tensors: by their names in the file.

    Raises InvalidArgument for keys that are missing or hold something else, or another number of experts than the first
    layer has, Unimplemented for a router that chooses by other scores than a softmax.
    """
    count, first = metadata.integer("{arch}.expert_count"), tensors.get(_FIRST_EXPERTS)
    if first is None or len(first.shape) != 3 or first.shape[0] != count:
        found = "is missing" if first is None else f"has the shape {list(first.shape)}"
        raise InvalidArgument(
            f"{metadata.path}: expert_count is {count}, but {_FIRST_EXPERTS} {found}; it must be [experts, rows, "
            "columns]",
            field="expert_count",
        )
    for key, only in (("{arch}.expert_gating_func", _SOFTMAX), ("{arch}.expert_weights_scale", 1.0)):
        if metadata.has(key) and metadata.number(key) != only:
            raise metadata.unsupported(key, f"of this architecture {only:g} alone is served")
    return {
        "num_experts": count,
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", True),
    }


def decoder_config(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], dense_size: int | None = None
) -> dict[str, Any]:
    """Return the sizes, the positions and the special tokens.

    tensors: by their names in the file. dense_size: inner elements of SwiGLU where the file does not say them.

    Raises InvalidArgument for keys and tensors that are missing or hold something else.
    """
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidArgument(f"{metadata.path} has no matrix token_embd.weight", field="token_embd.weight")
    heads, hidden = metadata.integer("{arch}.attention.head_count"), metadata.integer("{arch}.embedding_length")
    layers = metadata.integer("{arch}.block_count")
    if layers > len(tensors):
        raise InvalidArgument(
            f"{metadata.path}: block_count is {layers}, but the file has {len(tensors)} tensors in all",
            field="block_count",
        )
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("{arch}.attention.head_count_kv", heads),
        "head_dim": metadata.integer("{arch}.attention.key_length", hidden // heads),
        "intermediate_size": metadata.integer("{arch}.feed_forward_length", dense_size),
        "rms_norm_eps": metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("{arch}.context_length"),
        "rope_parameters": rope_parameters(metadata),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        # Files do not say in which type the model computed before it was packed; of these models all did in this one.
        "dtype": "bfloat16",
    }
    for name in ("bos", "eos"):
        token = metadata.token(name)
        if token is not None:
            config[f"{name}_token_id"] = token
    return config


def rope_parameters(metadata: Metadata) -> dict[str, Any]:
    """Return RoPE's base, and how it is scaled where it is."""
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number("{arch}.rope.freq_base", 10_000.0),
    }
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    if kind != "none":
        parameters |= {"rope_type": kind, "factor": metadata.number("{arch}.rope.scaling.factor")}
        length = "{arch}.rope.scaling.original_context_length"
        if metadata.has(length):
            parameters["original_max_position_embeddings"] = metadata.integer(length)
    return parameters
