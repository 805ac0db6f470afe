"""Gemma 3: the converter stores norms as w + 1. Files say neither which layers are full ones nor what scores are
multiplied by where these are as in the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import DECODER_NAMES, decoder_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import Elements, StoredTensor

_LAYERS_27B = 62
"""Those of the one size whose scores are divided by the root of its hidden elements over its heads."""


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    config = gemma_config(metadata, tensors)
    largest = config["num_hidden_layers"] == _LAYERS_27B
    scalar = config["hidden_size"] / config["num_attention_heads"] if largest else config["head_dim"]
    return {
        **config,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": scalar,
    }


def gemma_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return a decoder's configuration with what Gemma 3 and 4 have alike. Raises as `read_config`."""
    config = decoder_config(metadata, tensors)
    layers = config["num_hidden_layers"]
    sliding = metadata.pattern("{arch}.attention.sliding_window_pattern", layers, 6)
    full_rope = config["rope_parameters"]
    if not metadata.has("{arch}.rope.freq_base"):
        full_rope = full_rope | {"rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": metadata.number("{arch}.rope.freq_base_swa", 1e4)}
    capped = "{arch}.final_logit_softcapping"
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": metadata.integer("{arch}.attention.sliding_window"),
        "rope_parameters": {"full_attention": full_rope, "sliding_attention": local},
        "final_logit_softcapping": metadata.number(capped) if metadata.has(capped) else None,
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return DECODER_NAMES | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }


def stored_tensor(name: str, tensor: GgufTensor, _config: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor with what was changed of it."""
    return StoredTensor(tensor, tensor.shape, Elements.PLUS_ONE if name.endswith("norm.weight") else Elements.SAME)
