"""Qwen3 with mixtures of experts, which are held all together: else nothing but names differs from Hugging Face's
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model.gguf.container import GgufTensor
from services.model.gguf.decoder_config import DECODER_NAMES, EXPERTS_NAMES, decoder_config, experts_config
from services.model.gguf.metadata import Metadata
from services.model.gguf.tensors import stored_unchanged

stored_tensor = stored_unchanged


def read_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the configuration, as `Architecture` says."""
    experts = experts_config(metadata, tensors)
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **decoder_config(metadata, tensors, experts["moe_intermediate_size"]),
        **experts,
    }


def tensor_names() -> Mapping[str, str]:
    """Return the names of a layer's tensors."""
    return DECODER_NAMES | EXPERTS_NAMES | {"ffn_norm": "post_attention_layernorm"}
